"""The load of a soak: a few requests with the lengths of a production trace, and the times at which they arrive."""

from __future__ import annotations

import itertools
import random
from typing import Any

from rayloom_bench.fleet.traffic import TRAFFIC, generate

NUM_REQUESTS = 24  # number of different requests; each answer must be computed once without faults
# Lengths are the trace's lengths divided by this number: about 100 prompt tokens and 18 answer tokens.
_DIVISOR = 12.0
_TOKENS_OF_A_NUMBER = 7  # tokens of a number in a prompt: each of its six digits and its space is a token


def soak_requests(model: str, seed: int) -> list[dict[str, Any]]:
    """Different requests, alternately greedy and seeded. Each answer has at least two tokens."""
    rng = random.Random(seed)  # nosec: not for secrets
    arrivals = generate(TRAFFIC["chat"], rate=1.0, seconds=1000.0, divisor=_DIVISOR, seed=seed)
    made = []
    for index, arrival in enumerate(itertools.islice(arrivals, NUM_REQUESTS)):
        numbers = max(1, arrival.num_prompt // _TOKENS_OF_A_NUMBER)
        sampling = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0.0}
        body = {
            "model": model,
            "prompt": " ".join(str(rng.randint(100_000, 999_999)) for _ in range(numbers)),
            "max_tokens": max(2, arrival.num_output),
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            **sampling,
        }
        made.append({"path": "/v1/completions", "body": body})
    return made


def arrival_times(seed: int, rate: float, seconds: float) -> list[list[float]]:
    """[seconds, index of the request] of each arrival, with the trace's distribution of gaps."""
    arrivals = generate(TRAFFIC["chat"], rate=rate, seconds=seconds, divisor=_DIVISOR, seed=seed)
    return [[arrival.at_s, number % NUM_REQUESTS] for number, arrival in enumerate(arrivals)]
