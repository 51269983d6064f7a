"""Acceptance: the lengths of drafts follow from costs and past drafts. Drafting pauses where it saves no time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.speculation.acceptance import Acceptance, worthwhile


def test_the_last_token_of_a_draft_is_worth_its_cost() -> None:
    assert worthwhile(0.5, 0.3, 9) == 1, "0.5 > 0.3 > 0.25"
    assert worthwhile(0.5, 0.1, 9) == 3, "0.125 > 0.1 > 0.0625"
    assert worthwhile(0.5, 0.1, 2) == 2
    assert worthwhile(0.5, 0.5, 9) == 0
    assert worthwhile(0.5, 0.0, 9) == 9


@given(rate=st.floats(0.0, 0.99), cost=st.floats(0.0, 2.0), most=st.integers(0, 64))
def test_no_draft_has_a_token_that_costs_more_than_it_saves(rate, cost, most) -> None:
    num = worthwhile(rate, cost, most)
    assert 0 <= num <= most
    assert num == 0 or rate**num >= cost * (1 - 1e-6)
    assert num == most or rate <= cost or rate ** (num + 1) <= cost * (1 + 1e-6)


def test_text_that_is_copied_gets_the_longest_drafts() -> None:
    acceptance = Acceptance()
    for _ in range(8):
        num = acceptance.length(0.05, 100, 7)
        acceptance.note(num, num)
    assert acceptance.length(0.05, 100, 7) == 7


def test_drafts_that_are_never_accepted_cost_little() -> None:
    acceptance = Acceptance()
    num_drafted = 0
    for num_tokens in range(1000):
        num = acceptance.length(0.05, num_tokens, 7)
        num_drafted += num
        if num:
            acceptance.note(num, 0)
    # A drafted token costs 0.05 of a step. 18 tokens are drafted at the beginning, and 8 in the trials after pauses of
    # 32, 64, 128 and 256 tokens.
    assert num_drafted * 0.05 < 0.003 * 1000


def test_a_pause_ends_with_a_trial_and_success_ends_the_pauses() -> None:
    acceptance = Acceptance()
    num_tokens = 0
    while num := acceptance.length(0.1, num_tokens, 7):
        acceptance.note(num, 0)
        num_tokens += 1
    assert [acceptance.length(0.1, num_tokens + more, 7) for more in (1, 31)] == [0, 0]
    assert acceptance.length(0.1, num_tokens + 32, 7) == 1, "the trial"
    for _ in range(10):
        num = acceptance.length(0.1, num_tokens + 32, 7)
        acceptance.note(num, num)
    assert acceptance.length(0.1, num_tokens + 32, 7) == 7


def test_each_trial_in_vain_doubles_the_pause() -> None:
    acceptance = Acceptance()
    trials = []
    for num_tokens in range(300):
        num = acceptance.length(0.4, num_tokens, 7)
        if num:
            trials.append(num_tokens)
            acceptance.note(num, 0)
    assert [after - before for before, after in pairwise(trials) if after - before > 1] == [
        33,
        65,
        129,
    ]


def test_a_large_batch_pauses_nothing() -> None:
    acceptance = Acceptance()
    assert acceptance.length(1.5, 10, 7) == 0
    assert acceptance.length(0.05, 11, 7) > 0, "drafts go on as soon as the batch is small"
