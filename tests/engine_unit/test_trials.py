"""Trials of drafts that cost too much: the steps between them, and the sequences that are tried."""

from __future__ import annotations

from rayloom_engine.core.speculation.trials import Trials


def _steps_of_trials(trials: Trials, num_steps: int, has_draft: bool) -> list[int]:
    found = []
    for step in range(1, num_steps + 1):
        if trials.is_due():
            found.append(step)
            trials.tried(has_draft=has_draft)
    return found


def test_after_five_trials_each_pause_is_twice_as_long_up_to_1024_steps() -> None:
    # The pauses are 5 x 64, then 128, 256, 512, 1,024 and 1,024.
    assert _steps_of_trials(Trials(), 4000, has_draft=True) == [64, 128, 192, 256, 320, 448, 704, 1216, 2240, 3264]


def test_drafts_that_are_worth_their_cost_shorten_the_pauses_again() -> None:
    trials = Trials()
    _steps_of_trials(trials, 4000, has_draft=True)
    trials.paid()
    assert _steps_of_trials(trials, 200, has_draft=True) == [64, 128, 192]


def test_a_trial_without_a_draft_is_repeated_after_eight_steps_and_confirms_nothing() -> None:
    trials = Trials()
    assert _steps_of_trials(trials, 100, has_draft=False) == [64, 72, 80, 88, 96]
    assert _steps_of_trials(trials, 100, has_draft=True) == [4, 68], "4 of the 8 steps had passed"


def test_the_sequences_take_turns_in_trials() -> None:
    trials = Trials()
    assert [trials.in_turn("abc", 2) for _ in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert trials.in_turn("a", 2) == ["a"]
    assert trials.in_turn("", 2) == []
