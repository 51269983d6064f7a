"""Requests for tests of copies of KV blocks in host memory."""

from __future__ import annotations

from rayloom_engine.core.scheduler import Scheduler
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_sequence, run_to_end

PROMPT = tuple(range(10, 22))  # three blocks of 4 tokens
OTHERS = [tuple(range(first, first + 12)) for first in (100, 200, 300)]


def compute(scheduler: Scheduler, rank: SimulatedRank, name: str, prompt: tuple[int, ...], max_tokens: int = 2) -> int:
    """Computes a request to its end, checks its tokens, and returns its number of cached tokens."""
    sequence = make_sequence(name, prompt, max_tokens=max_tokens)
    scheduler.add(sequence)
    outputs = run_to_end(scheduler, rank)
    assert ids_of(outputs, name) == expected_ids(prompt, max_tokens)
    scheduler.check_integrity()
    assert sequence.num_cached_tokens is not None
    return sequence.num_cached_tokens
