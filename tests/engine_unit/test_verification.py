"""Verification of drafts on a rank: the rows that count, and the tokens that the sampler sees in each row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.step import SlotStep
from rayloom_engine.worker.bans import all_banned_ids
from rayloom_engine.worker.sampler import Sampler
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.verification import AcceptedRows, accepted_rows, sampled_rows, sampled_slots
from rt_sampling import random_logits, random_params
from rt_slots import make_slot

VOCAB_SIZE = 30


@pytest.mark.parametrize(
    ("draft", "token_ids", "expected"),
    [
        ((), [7], AcceptedRows(1)),
        ((), [None], AcceptedRows(0, is_corrupt=True)),
        ((4, 5), [4, 5, 6], AcceptedRows(3)),
        ((4, 5), [4, 9, 6], AcceptedRows(2)),
        ((4, 5), [9, 5, 6], AcceptedRows(1)),
        ((4, 5), [9, None, 6], AcceptedRows(1, is_dirty=True)),
        ((4, 5), [4, None, 6], AcceptedRows(1, is_dirty=True)),
        ((4, 5), [None, 5, 6], AcceptedRows(0, is_dirty=True)),
        ((4, 5), [4, 5, None], AcceptedRows(2, is_dirty=True)),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_the_drafts(draft, token_ids, expected) -> None:
    assert accepted_rows(draft, token_ids) == expected


def test_a_slot_has_a_row_for_its_newest_token_and_each_token_of_its_draft() -> None:
    plain, drafting = make_slot((1, 2), (3,)), make_slot((1, 2), (3,))
    drafting.write_draft((8, 9))
    steps = [
        (SlotStep(slot=0, start=2, num_tokens=1, samples=True), plain),
        (SlotStep(slot=1, start=2, num_tokens=3, draft_token_ids=(8, 9), samples=True), drafting),
    ]
    assert sampled_rows(steps, [1, 4]) == [0, 1, 2, 3]
    slots = sampled_slots(steps)
    assert [slot.token_ids[: slot.num_tokens].tolist() for slot in slots] == [
        [1, 2, 3],
        [1, 2, 3],
        [1, 2, 3, 8],
        [1, 2, 3, 8, 9],
    ]
    assert drafting.num_tokens == 3, "the draft is not the slot's own"
    drafting.append_tokens((8, 4))
    assert drafting.token_ids[: drafting.num_tokens].tolist() == [1, 2, 3, 8, 4]


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 5), min_size=2, max_size=80),
    num_prompt=st.integers(1, 40),
    num=st.integers(1, 9),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4),
    params=random_params(VOCAB_SIZE),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_draft_is_sampled_as_if_the_draft_were_the_sequence(
    ids, num_prompt, num, bad_words, params, seed
) -> None:
    num = min(num, len(ids) - 1)
    num_prompt = min(num_prompt, len(ids) - num)
    params = {**params, "bad_words": tuple(bad_words)}
    drafting = make_slot(ids[:num_prompt], ids[num_prompt : len(ids) - num], eos=(2,), **params)
    drafting.write_draft(tuple(ids[len(ids) - num :]))
    for length in range(num + 1):
        row = drafting.after_draft(length) if length else drafting
        whole = make_slot(ids[:num_prompt], ids[num_prompt : len(ids) - num + length], eos=(2,), **params)
        assert _banned(row) == _banned(whole)
        logits = random_logits(VOCAB_SIZE, seed + length, 3.0)
        sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
        assert sampler(logits.clone(), [row]) == sampler(logits.clone(), [whole])


def _banned(slot: Slot) -> set[int]:
    banned = all_banned_ids(slot, VOCAB_SIZE)
    return set() if banned is None else set(banned.tolist())
