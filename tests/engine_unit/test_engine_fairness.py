"""Two tenants on the real engine and scheduler: "x" floods the engine, and the times to first token of "y" have limits.

The unit of time is the cost of a computed token. A step costs `STEP` in addition. tests/engine_real/test_tenants.py
tests the same with seconds and a model.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque

import pytest

from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.errors import QueueFull
from rt_scheduler import SimulatedRank, make_scheduler, make_sequence

STEP = 16  # cost of a step besides its tokens
# The simulation has no randomness. Every request of "y" meets the same flood, and is sent a few steps after the
# previous request of "y".
NUM_MEASURED = 40


class _Flooder:
    """A tenant that always has `num_requests` requests of `n` choices submitted, or as many as the engine accepts."""

    def __init__(self, engine: Engine, num_requests: int, n: int, num_prompt: int, max_tokens: int) -> None:
        self._engine = engine
        self._num_requests = num_requests
        self._n = n
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._open: dict[int, set[str]] = {}  # request -> unfinished choices
        self._next = 0

    def send(self) -> None:
        while len(self._open) < self._num_requests:
            number = self._next
            self._next += 1
            prompt = tuple((number + position) % 40 for position in range(self._num_prompt))
            names = [f"x{number}.{choice}" for choice in range(self._n)]
            self._open[number] = set(names)
            for name in names:
                try:
                    self._engine.add(
                        make_sequence(
                            name,
                            prompt,
                            max_tokens=self._max_tokens,
                            tenant="x",
                            cache_key=b"x",
                            fork_of=None if name == names[0] else names[0],
                        )
                    )
                except QueueFull:
                    # 429: the whole request ends, and the client tries again at its next opportunity.
                    for accepted in names:
                        self._engine.abort(accepted)
                    del self._open[number]
                    return

    def finished(self, name: str) -> None:
        number = int(name[1:].partition(".")[0])
        self._open[number].discard(name)
        if not self._open[number]:
            del self._open[number]


@functools.cache  # a simulation takes a second or more, and two tests need the same simulations
def _first_token_times(num_requests: int, **flood: int) -> list[int]:
    """The cost until the first token, for each of NUM_MEASURED requests that "y" sends in a row while "x" floods."""
    scheduler = make_scheduler(600, max_num_seqs=64, max_num_batched_tokens=128, max_model_len=1200, max_queued=1024)
    engine = Engine(scheduler, LocalExecutor(SimulatedRank()), clock=time.monotonic)
    flooder = _Flooder(engine, num_requests, **flood)
    spent = 0
    waits: list[int] = []
    asked: deque[int] = deque()
    pause = 20
    while len(waits) < NUM_MEASURED:
        flooder.send()
        if pause == 0 and not asked:
            engine.add(make_sequence(f"y{len(waits)}", [49] * 8, max_tokens=4, tenant="y", cache_key=b"y"))
            asked.append(spent)
        pause = max(0, pause - 1)
        before = engine.times.num_tokens
        outputs = engine.step()
        spent += STEP + engine.times.num_tokens - before
        for output in outputs:
            if output.finish_reason and output.sequence_id[0] == "x":
                flooder.finished(output.sequence_id)
            if output.sequence_id[0] == "y":
                if len(asked) and output.sequence_id == f"y{len(waits)}":
                    waits.append(spent - asked.popleft())
                if output.finish_reason:
                    pause = 2
    return waits


def _p99(values: list[int]) -> int:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@pytest.mark.parametrize(
    "flood",
    [
        {"n": 128, "num_prompt": 10, "max_tokens": 60},
        {"n": 1, "num_prompt": 900, "max_tokens": 8},  # most of the time is spent on prompts
    ],
)
def test_a_flood_of_one_key_does_not_slow_the_other_ones_first_token(flood) -> None:
    alone = _p99(_first_token_times(1, **flood))
    flooded = _p99(_first_token_times(8, **flood))
    assert flooded < 3 * alone, (flooded, alone)


@pytest.mark.parametrize(
    "flood",
    [
        {"n": 128, "num_prompt": 10, "max_tokens": 60},
        {"n": 1, "num_prompt": 900, "max_tokens": 8},
        {"n": 8, "num_prompt": 300, "max_tokens": 200},  # KV blocks are scarce
    ],
)
def test_the_first_token_of_a_light_key_comes_within_a_full_step_or_two(flood) -> None:
    assert max(_first_token_times(8, **flood)) <= 2 * (STEP + 128)
