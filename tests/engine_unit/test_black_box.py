"""The files that a core leaves for its successor: the sequences in its last step, and suspects."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.common.process import silence_mark, trial_mark
from rayloom_engine.core_server.black_box import BlackBox


def test_the_next_core_books_the_death_of_a_step_once(tmp_path: Path) -> None:
    BlackBox(tmp_path).note({"a": (2, 3), "b": (3, 4)})
    assert BlackBox(tmp_path).suspicion.deaths == [{"a": (2, 3), "b": (3, 4)}]
    assert BlackBox(tmp_path).suspicion.deaths == [{"a": (2, 3), "b": (3, 4)}]


def test_a_death_between_steps_is_held_against_no_sequence(tmp_path: Path) -> None:
    box = BlackBox(tmp_path)
    box.note({"a-long-name": (2, 3)})
    box.note({})
    assert not box.died()
    assert BlackBox(tmp_path).suspicion.deaths == []


def test_suspects_outlive_the_core_and_a_death_in_a_trial_is_narrower(tmp_path: Path) -> None:
    for _ in range(2):
        BlackBox(tmp_path).note({"a": (2, 3), "b": (3, 4)})
    box = BlackBox(tmp_path)
    assert set(box.suspicion.suspects) == {"a", "b"}
    box.note({"a": (2, 3)})
    assert box.died()
    assert set(BlackBox(tmp_path).suspicion.suspects) == {"a"}


def test_a_mark_exists_while_suspects_are_computed(tmp_path: Path) -> None:
    for _ in range(2):
        BlackBox(tmp_path).note({"a": (2, 3), "b": (3, 4)})
        assert not trial_mark(tmp_path).exists(), "nobody is suspect yet"
    box = BlackBox(tmp_path)
    seen = []
    for in_flight in ({}, {"a": (2, 3)}, {"a": (2, 3)}, {}, {"a": (2, 3)}):
        box.note(in_flight)
        seen.append(trial_mark(tmp_path).exists())
    assert seen == [False, True, True, False, True]
    BlackBox(tmp_path)
    assert not trial_mark(tmp_path).exists(), "a core that dies before it computes is no trial"


def test_absent_suspects_make_no_trial_of_other_sequences(tmp_path: Path) -> None:
    for _ in range(2):
        BlackBox(tmp_path).note({"a": (2, 3)})
    box = BlackBox(tmp_path)
    box.note({"b": (0, 3)})
    assert not trial_mark(tmp_path).exists(), "the supervisor books this death"
    assert not box.is_trial


def test_a_core_that_was_killed_without_a_sign_of_life_condemns_no_sequence(tmp_path: Path) -> None:
    for _ in range(5):
        BlackBox(tmp_path).note({"a": (2, 3)})
        silence_mark(tmp_path).touch()
    suspicion = BlackBox(tmp_path).suspicion
    assert (suspicion.deaths, suspicion.suspects, suspicion.condemned) == ([], {}, [])
    assert not silence_mark(tmp_path).exists()
    box = BlackBox(tmp_path)
    box.note({"a": (2, 3)})
    assert not box.died(was_silent=True), "a rank that was stopped"
    assert box.suspicion.deaths == []


@pytest.mark.parametrize("name", ["in_flight", "suspicion"])
def test_a_record_that_is_cut_off_counts_as_none(tmp_path: Path, name: str) -> None:
    BlackBox(tmp_path).note({"a": (2, 3)})
    BlackBox(tmp_path).note({"a": (2, 3)})
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:6])
    BlackBox(tmp_path)
