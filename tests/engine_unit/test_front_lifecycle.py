"""The time for which requests may run in a drain, measured by a clock that the tests set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayloom_engine.front.operations import lifecycle as module
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.process import write_mark

DRAIN_S = 120.0
Step = tuple[float, Callable[[Lifecycle], object]]


def drain(lifecycle: Lifecycle) -> None:
    lifecycle.drain(True)


def take_back(lifecycle: Lifecycle) -> None:
    lifecycle.drain(False)


def stop(lifecycle: Lifecycle) -> None:
    lifecycle.stop()


@pytest.mark.parametrize(
    ("steps", "left_s"),
    [
        ([(100.0, stop)], 120.0),
        ([(100.0, drain), (160.0, stop)], 60.0),
        ([(100.0, drain), (150.0, drain), (160.0, stop)], 60.0),
        ([(100.0, drain), (300.0, stop)], 0.0),
        ([(100.0, drain), (150.0, take_back), (160.0, stop)], 120.0),
        ([(100.0, drain), (150.0, take_back), (155.0, drain), (160.0, stop)], 115.0),
        ([(100.0, stop), (160.0, drain)], 60.0),
        ([(100.0, lambda restarted: restarted.drain(True, 50.0)), (160.0, stop)], 10.0),
    ],
)
def test_the_time_of_a_drain_counts_from_the_first_of_drain_request_and_stop(
    monkeypatch: pytest.MonkeyPatch, steps: list[Step], left_s: float
) -> None:
    lifecycle, clock = Lifecycle(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    for clock.now, step in steps:
        step(lifecycle)
    assert lifecycle.drains
    assert lifecycle.drain_left_s(DRAIN_S) == left_s


def test_an_idle_front_has_drained_also_with_no_time_left() -> None:
    async def drained(num_requests: int) -> bool:
        lifecycle = Lifecycle()
        for _ in range(num_requests):
            lifecycle.enter()
        return await lifecycle.wait_idle(0.0)

    assert asyncio.run(drained(0))
    assert not asyncio.run(drained(1))


def test_a_front_has_drained_once_requests_and_readers_have_ended() -> None:
    async def story() -> list[bool]:
        lifecycle = Lifecycle()
        lifecycle.enter()
        lifecycle.begin_read()
        lifecycle.begin_read()
        found = []
        for end in (lifecycle.end_read, lifecycle.leave, lifecycle.end_read):
            end()
            found.append(await lifecycle.wait_idle(0.0))
        return found

    assert asyncio.run(story()) == [False, False, True]


def test_a_mark_that_cannot_be_written_keeps_no_front_from_its_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = Lifecycle()
    lifecycle.on_ready = lambda: write_mark(tmp_path / "no-such-folder" / "loaded")
    lifecycle.become_ready()
    assert lifecycle.was_ready
    assert "cannot write" in caplog.text
