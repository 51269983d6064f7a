"""Kills for lack of memory, and the time for which the message about a lost rank mentions such a kill."""

from __future__ import annotations

from rayloom_engine.core_server.ranks.memory_kills import MemoryKills

KILLED = "The kernel has killed processes on a for want of memory ({} so far)"


def test_kills_before_the_first_rank_attached_are_not_reported() -> None:
    kills = MemoryKills()
    kills.note("a", 7, now=0.0)
    kills.note("a", 7, now=1.0)
    assert kills.sentence(1.0) == ""


def test_a_kill_is_reported_for_as_long_as_deaths_count() -> None:
    kills = MemoryKills()
    kills.note("a", 7, now=0.0)
    kills.note("a", 9, now=100.0)
    assert KILLED.format(2) in kills.sentence(700.0)
    assert kills.sentence(700.1) == ""


def test_a_later_fault_has_not_the_cause_of_an_old_one() -> None:
    kills = MemoryKills()
    kills.note("a", 0, now=0.0)
    kills.note("a", 1, now=100.0)
    kills.note("a", 1, now=1_000_000.0)  # the rank attaches again after another fault
    assert kills.sentence(1_000_000.0) == ""
    kills.note("a", 2, now=1_000_100.0)
    assert KILLED.format(2) in kills.sentence(1_000_100.0)


def test_a_container_that_was_started_again_counts_from_zero() -> None:
    kills = MemoryKills()
    kills.note("a", 3, now=0.0)
    kills.note("a", 0, now=1.0)
    assert kills.sentence(1.0) == ""
    kills.note("a", 1, now=2.0)
    assert KILLED.format(1) in kills.sentence(2.0)


def test_each_host_has_its_own_count() -> None:
    kills = MemoryKills()
    kills.note("a", 5, now=0.0)
    kills.note("b", 6, now=0.0)
    assert kills.sentence(0.0) == ""
