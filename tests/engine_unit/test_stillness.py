"""The time at which a thread counts as hung.

A blocked thread counts as hung after PATIENCE seconds. A busy thread counts as hung when its CPU seconds reach a cap.
So it does not matter how busy the machine is.
"""

from __future__ import annotations

import threading

import pytest

from rayloom_engine.common.process import thread_cpu_clock
from rayloom_engine.core_server.ranks.stillness import Stillness, patience_s

PATIENCE = 4.0


def _hung_at(share: float, seconds: int, until: float = float("inf")) -> float | None:
    """Returns the time at which a thread without progress counts as hung. It uses `share` of a core until `until`."""
    stillness = Stillness()
    for tick in range(2 * seconds + 1):
        now = tick / 2
        stillness.observe(now, "mark", 100.0 + share * min(now, until))
        if stillness.is_hung(PATIENCE):
            return now
    return None


def test_a_blocked_thread_is_found_after_the_patience() -> None:
    assert _hung_at(0.0, 60) == 4.5


def test_a_thread_that_only_wakes_up_to_poll_is_blocked() -> None:
    assert _hung_at(0.04, 60) == 4.5


def test_a_thread_that_computes_is_slow_until_the_cap_in_cpu_seconds() -> None:
    assert _hung_at(1.0, 60) == 40.5, "10 x 4 s"
    assert _hung_at(0.25, 150) is None, "a loaded machine: 37.5 CPU seconds in 150 s"
    assert _hung_at(0.25, 170) == 160.5


def test_a_thread_that_blocks_after_it_has_computed_is_found_as_soon() -> None:
    assert _hung_at(1.0, 60, until=10.0) == 14.5


def test_progress_begins_everything_again_and_nothing_to_do_is_no_hang() -> None:
    stillness = Stillness()
    for now in range(100):
        stillness.observe(float(now), now // 3, 0.0)
        assert not stillness.is_hung(PATIENCE)
        assert stillness.still_s == now % 3
    for now in range(100, 200):
        stillness.observe(float(now), None, 0.0)
        assert not stillness.is_hung(PATIENCE)


@pytest.mark.parametrize(
    ("forecast_s", "is_trial", "seconds"),
    [
        (0.0, False, 10.0),
        (1.9, False, 10.0),
        (6.0, False, 30.0),
        (0.0, True, 40.0),
        (6.0, True, 120.0),
        (974.0, False, 60.0),
    ],
)
def test_patience_follows_from_the_forecast_and_is_longer_in_a_trial(
    forecast_s: float, is_trial: bool, seconds: float
) -> None:
    assert patience_s(10.0, forecast_s, is_trial=is_trial) == seconds


def test_the_clock_of_a_thread_counts_that_thread_alone_and_outlives_it() -> None:
    clocks: list[object] = []
    is_idle, may_end = threading.Event(), threading.Event()

    def burn_then_idle() -> None:
        clock = thread_cpu_clock()
        clocks.append(clock)
        while clock() < 0.05:
            pass
        is_idle.set()
        may_end.wait(30.0)

    thread = threading.Thread(target=burn_then_idle)
    thread.start()
    assert is_idle.wait(30.0)
    [clock] = clocks
    before, own = clock(), thread_cpu_clock()  # type: ignore[operator]
    start = own()
    while own() - start < 0.05:
        pass
    assert 0.05 <= before <= clock() < before + 0.04, "this thread's time is not counted"  # type: ignore[operator]
    may_end.set()
    thread.join()
    assert clock() >= before  # type: ignore[operator]
