"""The times for which tests on pods count the condition Available as wrong."""

from __future__ import annotations

from functools import partial

from observers import availability

UP, DOWN = True, False
untrue_times = partial(availability.untrue_times, late_s=10)


def test_a_status_that_follows_within_ten_seconds_tells_the_truth():
    answers = [0, 1, 2, 30, 31, 32, 33, 34, 35]
    assert untrue_times([(0, UP), (12, DOWN), (40, UP)], answers, 0, 40) == []


def test_available_may_not_stand_for_long_without_a_token():
    answers = [0, 1, 2, 30, 31]
    assert untrue_times([(0, UP), (13, DOWN), (30, UP)], answers, 0, 32) == [
        "Available stood for 11.0 s without a token"
    ]


def test_available_may_not_come_back_long_before_the_tokens():
    answers = [0, 1, 2, 30, 31]
    assert untrue_times([(0, UP), (2, DOWN), (19, UP)], answers, 0, 32) == [
        "Available stood for 11.0 s without a token"
    ]


def test_a_prober_that_never_gets_an_answer_again_counts_too():
    assert untrue_times([(0, UP)], [0, 1, 2], 0, 20) == ["Available stood for 18.0 s without a token"]


def test_a_prober_that_never_got_an_answer_counts():
    assert untrue_times([(0, UP)], [], 0, 200) == ["Available stood for 200.0 s without a token"]


def test_available_may_not_stand_for_long_before_the_first_token():
    assert untrue_times([(-5, UP)], [60, 61, 62], 0, 63) == ["Available stood for 60.0 s without a token"]


def test_short_breaks_do_not_make_a_status_true():
    flapping = [(start + at, state) for start in range(0, 120, 10) for at, state in ((0, UP), (9, DOWN))]
    assert untrue_times(flapping, [], 0, 120) == ["Available stood for 108.0 s without a token"]


def test_answers_after_the_end_do_not_count():
    assert untrue_times([(0, UP)], [0, 40], 0, 20) == ["Available stood for 20.0 s without a token"]


def test_available_may_not_be_false_for_long_while_tokens_flow():
    answers = [float(second) for second in range(10, 31)]
    assert untrue_times([(0, UP), (5, DOWN), (28, UP)], answers, 0, 30) == ["Available was False for 18.0 s of tokens"]


def test_pauses_between_tokens_begin_anew_what_may_be_late():
    answers = [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 16]
    assert untrue_times([(0, DOWN), (17, UP)], answers, 0, 18) == []
