"""The blamed rank and the time of the blame, if all ranks send heartbeats and none makes progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core_server.ranks.standstill import Standstill, rank_to_blame
from rayloom_engine.protocol.ranks import Beat
from rayloom_engine.worker.activity import Activity, WatchedGroup


def _beat(phase: str, advance: int, waits: bool = False, cpu_s: float = 0.0) -> Beat:
    return Beat(phase=phase, step=0, memory_bytes=0, advance=advance, waits=waits, cpu_s=cpu_s)


@pytest.mark.parametrize(
    ("beats", "blamed"),
    [
        # Pipeline: the first stage has finished, the second computes for ever.
        ([_beat("idle", 40), _beat("step", 7)], 1),
        # The first stage computes for ever, the others wait for it.
        ([_beat("step", 7), _beat("step", 1, True), _beat("step", 1, True)], 0),
        # The first stage never took its plan.
        ([_beat("idle", 40), _beat("step", 41, True)], 0),
        # A shard is stuck in a kernel, its peers in the sum.
        ([_beat("step", 9, True), _beat("step", 8), _beat("step", 9, True)], 1),
        # All ranks wait in a sum; one of them has missed the previous sum.
        ([_beat("step", 9, True), _beat("step", 9, True), _beat("step", 7, True)], 2),
    ],
)
def test_the_rank_that_the_others_wait_for_is_blamed(beats: list[Beat], blamed: int) -> None:
    assert rank_to_blame(dict(enumerate(beats))) == blamed


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=8))
def test_a_rank_that_waits_for_a_peer_is_blamed_only_when_all_do(ranks: list[tuple[int, bool]]) -> None:
    beats = {rank: _beat("step", advance, waits) for rank, (advance, waits) in enumerate(ranks)}
    blamed = beats[rank_to_blame(beats)]
    assert not blamed.waits or all(beat.waits for beat in beats.values())
    assert all(blamed.advance <= beat.advance for beat in beats.values() if beat.waits == blamed.waits)


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(0, 2)), max_size=40))
def test_ranks_are_patient_while_any_advances_and_not_longer(turns: list[tuple[float, int]]) -> None:
    watch, now, last_change = Standstill(), 0.0, 0.0
    advances = [0, 0]
    watch.observe(now, dict(enumerate(_beat("step", advance) for advance in advances)), 4.0)
    for seconds, moved in turns:
        now += seconds
        if moved < 2:
            advances[moved] += 1
            last_change = now
        found = watch.observe(now, dict(enumerate(_beat("step", advance) for advance in advances)), 4.0)
        assert (found is not None) == (now - last_change > 4.0)


def test_time_in_which_nothing_was_due_does_not_count() -> None:
    watch, beats = Standstill(), {0: _beat("idle", 1)}
    watch.observe(0.0, beats, 4.0)
    watch.reset()
    assert watch.observe(100.0, beats, 4.0) is None
    assert watch.observe(103.9, beats, 4.0) is None
    assert watch.observe(104.1, beats, 4.0) == 0


def _blamed(cpu_shares: list[float], waits: list[bool]) -> tuple[float, int] | None:
    """Returns (time, rank) of the first blame.

    The ranks are in a step, make no progress and use these shares of a core.
    """
    watch = Standstill()
    for tick in range(400):
        now = tick / 4
        beats = {
            rank: _beat("step", 7, is_waiting, share * now)
            for rank, (share, is_waiting) in enumerate(zip(cpu_shares, waits, strict=True))
        }
        blamed = watch.observe(now, beats, 4.0)
        if blamed is not None:
            return now, blamed
    return None


@pytest.mark.parametrize(
    ("cpu_shares", "waits", "blamed"),
    [
        # Rank 1 waits for a slow rank. The slow rank is blamed after 10 x 4 CPU seconds.
        ([1.0, 0.0], [False, True], (40.25, 0)),
        # A peer that polls or spins while it waits counts as doing no work.
        ([0.0, 1.0], [False, True], (4.25, 0)),
        # One rank is slow; the other is blocked, but does not wait for the first.
        ([1.0, 0.0], [False, False], (4.25, 1)),
        # A slow rank gets half a core: the cap of 40 CPU seconds is reached after 80 s.
        ([0.5, 0.0], [False, True], (80.25, 0)),
        # All ranks wait for each other, because a rank has missed a message.
        ([1.0, 1.0], [True, True], (4.25, 0)),
    ],
)
def test_a_rank_that_burns_cpu_is_slow_and_one_that_does_not_is_blamed(
    cpu_shares: list[float], waits: list[bool], blamed: tuple[float, int]
) -> None:
    assert _blamed(cpu_shares, waits) == blamed


def test_work_is_that_of_ranks_that_compute_and_none_is_due_between_steps() -> None:
    watch = Standstill()
    for now in range(31):
        # The first rank only uses CPU time, the second waits for it.
        watch.observe(float(now), {0: _beat("step", 7, False, float(now)), 1: _beat("step", 7, True, 0.0)}, 40.0)
        assert watch.quiet_s == 0.0
    for now in range(31, 41):
        watch.observe(float(now), {0: _beat("step", 7, False, 30.0), 1: _beat("step", 7, True, 0.0)}, 40.0)
    assert watch.quiet_s == 10.0
    watch.reset()
    assert watch.quiet_s is None


def test_patience_may_grow_while_ranks_are_watched() -> None:
    watch, beats = Standstill(), {0: _beat("step", 1)}
    watch.observe(0.0, beats, 4.0)
    assert watch.observe(5.0, beats, 16.0) is None
    assert watch.observe(15.9, beats, 16.0) is None
    assert watch.observe(16.1, beats, 16.0) == 0


def test_a_wait_for_a_peer_is_counted_and_over_also_when_it_fails() -> None:
    class Broken:
        def all_reduce(self, part: object) -> object:
            assert activity.waits
            raise RuntimeError("the peer is gone")

    activity = Activity()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        WatchedGroup(Broken(), activity).all_reduce(None)  # type: ignore[arg-type]
    assert (activity.advance, activity.waits) == (2, False)
    assert activity.communication_s > 0
