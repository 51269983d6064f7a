"""Which rank is blamed when all show signs of life and none gets on; and when that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.protocol.ranks import Beat
from rayloom_engine.ranks.standstill import Standstill, who_stands_still
from rayloom_engine.worker.activity import Activity, WatchedGroup


def _beat(phase: str, advance: int, waits: bool = False) -> Beat:
    return Beat(phase=phase, step=0, memory_bytes=0, advance=advance, waits=waits)


@pytest.mark.parametrize(
    ("beats", "blamed"),
    [
        # Pipeline: the first stage is done, the second computes for ever.
        ([_beat("idle", 40), _beat("step", 7)], 1),
        # The first stage computes for ever, the others wait for it.
        ([_beat("step", 7), _beat("step", 1, True), _beat("step", 1, True)], 0),
        # The first stage never took its plan.
        ([_beat("idle", 40), _beat("step", 41, True)], 0),
        # A shard is stuck in a kernel, its peers in the sum.
        ([_beat("step", 9, True), _beat("step", 8), _beat("step", 9, True)], 1),
        # All are in a sum: one missed the one before.
        ([_beat("step", 9, True), _beat("step", 9, True), _beat("step", 7, True)], 2),
    ],
)
def test_the_rank_that_the_others_wait_for_is_blamed(beats: list[Beat], blamed: int) -> None:
    assert who_stands_still(dict(enumerate(beats))) == blamed


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=8))
def test_who_waits_for_a_peer_is_blamed_only_when_all_do(ranks: list[tuple[int, bool]]) -> None:
    beats = {rank: _beat("step", advance, waits) for rank, (advance, waits) in enumerate(ranks)}
    blamed = beats[who_stands_still(beats)]
    assert not blamed.waits or all(beat.waits for beat in beats.values())
    assert all(blamed.advance <= beat.advance for beat in beats.values() if beat.waits == blamed.waits)


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(0, 2)), max_size=40))
def test_ranks_are_patient_while_any_advances_and_not_longer(turns: list[tuple[float, int]]) -> None:
    watch, now, last_change = Standstill(4.0), 0.0, 0.0
    advances = [0, 0]
    watch.observe(now, dict(enumerate(_beat("step", advance) for advance in advances)))
    for seconds, moved in turns:
        now += seconds
        if moved < 2:
            advances[moved] += 1
            last_change = now
        found = watch.observe(now, dict(enumerate(_beat("step", advance) for advance in advances)))
        assert (found is not None) == (now - last_change > 4.0)


def test_time_in_which_nothing_was_due_does_not_count() -> None:
    watch, beats = Standstill(4.0), {0: _beat("idle", 1)}
    watch.observe(0.0, beats)
    watch.reset()
    assert watch.observe(100.0, beats) is None
    assert watch.observe(103.9, beats) is None
    assert watch.observe(104.1, beats) == 0


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
