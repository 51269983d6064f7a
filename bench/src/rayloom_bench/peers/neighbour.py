"""One stream with the lengths of W3, alone and beside a process that keeps a core busy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayloom_bench.busy_neighbour import busy_neighbour
from rayloom_bench.client import RequestOptions
from rayloom_bench.endpoint import Endpoint
from rayloom_bench.peers.workloads import W3
from rayloom_bench.timed_stream import run_timed_stream
from rayloom_bench.workload import token_prompts

STREAM = replace(W3, name="W3n")  # The name gives this measurement its own prompts, so no prefix cache has them.


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourFigures:
    """Output tokens per second of one stream, measured for a few seconds alone and beside the busy process."""

    alone_tok_s: float
    beside_tok_s: float


def measure_neighbour(
    endpoint: Endpoint, options: RequestOptions, *, seed: int, vocab_size: int, seconds: float
) -> NeighbourFigures:
    """Measures for `seconds` without the busy process, then for `seconds` with it. Raises EndpointError.

    The time is limited instead of the number of tokens, because some engines nearly stop beside a busy process.
    """
    prompts = token_prompts(STREAM, seed=seed, vocab_size=vocab_size)
    half = len(prompts) // 2
    alone = run_timed_stream(endpoint, STREAM, prompts[:half], options, seconds)
    with busy_neighbour():
        beside = run_timed_stream(endpoint, STREAM, prompts[half:], options, seconds)
    return NeighbourFigures(alone_tok_s=alone.tok_s, beside_tok_s=beside.tok_s)
