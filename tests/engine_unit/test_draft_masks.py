"""Drafts of sequences with a grammar or a limit of reasoning: the mask of each row, and the state after a draft."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.step import SlotStep
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.worker.draft_forms import DRAFTS_S, DraftForms
from rayloom_engine.worker.forms import Form, Forms
from rayloom_engine.worker.masks import MASKS_S, Masks
from rayloom_engine.worker.verification import accepted_rows, sampled_slots
from rt_draft_masks import PROMPT, TOO_COMPLEX, core_grammar, draft_step, fitted, form_params, set_masks, texts_of
from rt_forms import EOS, ids_of, tiny_vocabulary
from rt_tiny import VOCAB_SIZE


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(tiny_vocabulary)


def _rows(forms: Forms, params: DecodingParams, draft: str | tuple[int, ...], generated: str = "") -> list[str | None]:
    """The allowed tokens of each row that has a mask."""
    pair = draft_step(forms, 0, params, draft, generated)
    found = set_masks(forms, pair)
    assert found.broken == {}
    return [texts_of(slot.allowed) for slot in (pair[1], *found.after_drafts[0])]


@pytest.mark.parametrize(
    ("form", "generated", "draft", "expected"),
    [
        ({"regex": "ab?c"}, "", "abc", ["a", "bc", "c", "$"]),
        ({"regex": "ab?c"}, "a", "c", ["bc", "$"]),
        ({"regex": "ab?c"}, "", "acb", ["a", "bc", "$"]),
        ({"regex": "ab?c"}, "", "xbc", ["a"]),
        ({"choice": ["one", "two"]}, "", "tw", ["ot", "w", "o"]),
        ({"lark": 'start: "x" "y"* "z"'}, "xy", "yyz", ["yz", "yz", "yz", "$"]),
        ({"json": {"enum": [{"k": 1}]}}, '{"k', '":1', ['"', ":\t\n\r ", "1\t\n\r ", "}\t\n\r "]),
        ({"regex": "[12]", "after": "</t>"}, "I </", "t>1", [None, None, "12", "$"]),
        ({"regex": "[12]", "after": "</t>"}, "I </", "t>3", [None, None, "12"]),
    ],
)
def test_row_i_has_the_mask_after_the_first_i_tokens_of_the_draft(
    forms: Forms, form: dict[str, object], generated: str, draft: str, expected: list[str | None]
) -> None:
    assert _rows(forms, form_params(form), draft, generated) == expected


def test_the_end_may_be_drafted_and_nothing_else_follows_it(forms: Forms) -> None:
    assert _rows(forms, form_params({"regex": "ab?"}), (*ids_of("a"), EOS, EOS)) == ["a", "$b", "$", "$"]
    assert _rows(forms, form_params({"regex": "ab?"}), (*ids_of("a"), EOS, *ids_of("b"))) == ["a", "$b", "$"]


def test_the_bans_of_a_row_count_the_tokens_of_the_draft(forms: Forms) -> None:
    least = form_params({"regex": "a*"}, min_tokens=2)
    assert _rows(forms, least, "aa") == ["a", "a", "$a"]
    no_double_b = form_params({"regex": "[ab]*c"}, bad_words=(tuple(ids_of("bb")),))
    assert _rows(forms, no_double_b, "abab") == ["abc", "abc", "ac", "abc", "ac"]
    assert _rows(forms, no_double_b, "abbc") == ["abc", "abc", "ac"]


def test_a_limit_of_reasoning_forces_tokens_inside_a_draft(forms: Forms) -> None:
    budget = ThinkingBudget(num_tokens=3, start="", ends=("</t>",), end_ids=tuple(ids_of("</t>")))
    thinking = form_params({}, thinking=budget)
    assert _rows(forms, thinking, "bc</t>!", "a") == [None, None, "<", "/", "t", ">", None, None]
    assert _rows(forms, thinking, "bcd", "a") == [None, None, "<"]
    assert _rows(forms, thinking, "x</", "ab") == [None, "<", "/", "t"]
    both = form_params({"regex": "12", "after": "</t>"}, thinking=budget)
    assert _rows(forms, both, "bc</t>12", "a") == [None, None, "<", "/", "t", ">", "1", "2", "$"]


def test_a_draft_leaves_the_state_of_its_slot_as_it_was(forms: Forms) -> None:
    budget = ThinkingBudget(num_tokens=2, start="", ends=("</t>",), end_ids=tuple(ids_of("</t>")))
    params = form_params({"regex": "12|13", "after": "</t>"}, thinking=budget)
    pair = draft_step(forms, 0, params, "b</t>12")
    slot = pair[1]
    for sampled, allowed in (("a", None), ("b", "<"), ("<", "/"), ("/", "t"), ("t", ">"), (">", "1"), ("1", "23")):
        set_masks(forms, pair)
        slot.append_tokens(tuple(ids_of(sampled)))
        assert set_masks(forms, (SlotStep(slot=0, start=0, num_tokens=1, samples=True), slot)).broken == {}
        assert texts_of(slot.allowed) == allowed


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(
        (
            {"regex": "(ab|a)*c{2,5}"},
            {"json_object": True},
            {"choice": ["abc", "abd", "x", "abcdef"]},
            {"json": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"maxLength": 3}}}},
            {"lark": 'start: "a" b* "c"\nb: /[xy]{2}/ | "z" start "z"'},
        )
    ),
    after=st.sampled_from(("", "xy")),
    data=st.data(),
)
def test_a_form_after_a_draft_equals_a_form_that_never_saw_it(form, after, data) -> None:
    params = form_params({**form, "after": after})
    own = _begun(params, [])
    generated: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        mask = _key(own.allowed(()))
        assert mask == _key(_begun(params, generated).allowed(()))
        draft: list[int] = []
        with own.ahead():
            for _ in range(data.draw(st.integers(0, 4))):
                draft.append(_drawn(data, own.allowed(())))
                own.append(draft[-1:])
                assert _key(own.allowed(())) == _key(_begun(params, generated + draft).allowed(()))
        assert _key(own.allowed(())) == mask
        checked = _begun(params, generated)
        num_legal = draft.index(EOS) if EOS in draft else len(draft)
        assert checked.legal_prefix(draft) >= num_legal
        forced = checked.forced()
        assert checked.legal_prefix(forced) == len(forced)
        sampled = forced[:1] if forced and data.draw(st.booleans()) else [_drawn(data, own.allowed(()))]
        own.append(sampled)
        generated += sampled


_SHARED = Forms(tiny_vocabulary)


def _begun(params: DecodingParams, generated: list[int]) -> Form:
    form = _SHARED.begin(params)
    form.append(generated)
    return form


def _key(mask: Mask | None) -> bytes | None:
    return None if mask is None else mask.tobytes()


def _drawn(data: st.DataObject, mask: Mask | None) -> int:
    """A token that the mask allows."""
    if mask is None:
        return data.draw(st.sampled_from(ids_of("xya")))
    return int(data.draw(st.sampled_from(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))


def test_a_fault_in_a_draft_ends_the_draft_and_not_the_sequence(forms: Forms) -> None:
    params = DecodingParams(max_tokens=9, grammar=TOO_COMPLEX)
    pair = draft_step(forms, 0, params, "bx")
    for _ in range(2):  # the second time, a copy of the matcher follows the draft
        found = set_masks(forms, pair)
        assert (found.broken, found.after_drafts[0], texts_of(pair[1].allowed)) == ({}, [], "ab")
    pair[1].append_tokens(tuple(ids_of("a")))
    assert set_masks(forms, pair).broken == {}
    assert texts_of(pair[1].allowed) == "c"
    (step, slot) = draft_step(forms, 0, params, "x", "b")
    assert "max is 2000" in set_masks(forms, (step, slot)).broken[0].message


def test_drafts_get_masks_in_the_time_that_the_other_masks_leave(forms: Forms) -> None:
    ticks = iter(range(1000))
    # Each mask takes 0.3 of MASKS_S. So there is time for the masks of three slots, and for one row of one draft.
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=lambda: 0.3 * MASKS_S * next(ticks))
    pairs = [draft_step(forms, number, form_params({"regex": "[ab]{9}"}), "ab") for number in range(3)]
    found = masks.set(pairs, is_whole_step=True)
    assert found.postponed == set()
    assert {number: len(rows) for number, rows in found.after_drafts.items()} == {0: 1, 1: 0, 2: 0}
    plain = (SlotStep(slot=5, start=1, num_tokens=1, samples=True), pairs[0][1])
    assert masks.set([plain], is_whole_step=True).after_drafts == {}


def test_a_slot_whose_mask_is_late_has_no_row_of_its_draft(forms: Forms) -> None:
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=iter((0.0, 1.0, 1.0)).__next__)
    pairs = [draft_step(forms, number, form_params({"regex": "[ab]{9}"}), "ab") for number in range(2)]
    found = masks.set(pairs, is_whole_step=True)
    assert (found.postponed, found.after_drafts) == ({1}, {0: [], 1: []})


def test_rows_without_a_mask_are_computed_but_never_count(forms: Forms) -> None:
    pair = draft_step(forms, 0, form_params({"regex": "ab?c"}), "axc")
    found = set_masks(forms, pair)
    slots = sampled_slots([pair], found.after_drafts)
    assert [texts_of(slot.allowed) for slot in slots] == ["a", "bc", None, None]
    assert [slot.num_tokens for slot in slots] == [2, 3, 4, 5]
    a, b, c, x = ids_of("abcx")
    assert accepted_rows((a, x, c), [a, b, c, 7], num_verified=1).num_tokens == 2
    assert accepted_rows((a, x, c), [a, x, c, 7], num_verified=1).num_tokens == 2, "whatever the row without a mask has"
    dirty = accepted_rows((a, x, c), [a, b, None, 7], num_verified=1)
    assert (dirty.num_tokens, dirty.is_dirty) == (2, True)


@pytest.mark.parametrize(
    ("form", "generated", "draft", "expected"),
    [
        ({"regex": "ab?c"}, "", "abc", "abc"),
        ({"regex": "ab?c"}, "", "abx", "ab"),
        ({"regex": "ab?c"}, "", "xbc", "a"),  # the grammar forces "a"
        ({"regex": "ab?c"}, "a", "", ""),  # b or c
        ({"choice": ["one", "two"]}, "t", "", "wo"),
        ({"lark": 'start: "{name: " /[a-z]/ ", value: " /[0-9]/'}, "{name: k", "]", ", value: "),
        ({"regex": "[12]", "after": "</t>"}, "I </", "t>1x", "t>1"),
        ({"regex": "[12]", "after": "</t>"}, "I </", "", ""),
        ({"lark": TOO_COMPLEX}, "", "ac", "ac"),
        ({"lark": TOO_COMPLEX}, "bx", "1", ""),  # the rank has this fault, too, and reports it
    ],
)
def test_the_core_keeps_the_legal_prefix_of_a_draft_or_takes_the_forced_text(
    forms: Forms, form: dict[str, object], generated: str, draft: str, expected: str
) -> None:
    assert fitted(DraftForms(forms), form, generated, draft) == expected


def test_forced_text_is_no_longer_than_a_draft_may_be(forms: Forms) -> None:
    assert fitted(DraftForms(forms), {"choice": ["abcdef", "x"]}, "a", "", num=3) == "bcd"


def test_the_grammar_of_the_core_follows_the_answer(forms: Forms) -> None:
    grammar = core_grammar(DraftForms(forms), form_params({"regex": "(ab|c)*d"}))
    ids = list(PROMPT)
    for text, forced in (("a", "b"), ("bcca", "b"), ("bd", "")):
        ids += ids_of(text)
        assert grammar.fit(ids, (), 4) == tuple(ids_of(forced))
    assert grammar.fit(ids, tuple(ids_of("a")), 4) == ()


def test_a_grammar_that_is_not_built_gives_no_draft_and_the_wait_counts() -> None:
    has_begun, gate = threading.Event(), threading.Event()
    slow = Forms(lambda: has_begun.set() or (tiny_vocabulary() if gate.wait(60) else None))
    grammar = DraftForms(slow).begin(form_params({"regex": "ab"}), len(PROMPT))
    assert has_begun.wait(60)
    slow._builds._wall_s = 0.0  # the build is given up after the first counted wait
    assert grammar.fit(PROMPT, tuple(ids_of("ab")), 4) == ()
    assert slow._vocabulary.given_up, "the wait was counted"
    gate.set()
    while not grammar._form.is_built:
        grammar._form.wait_a_slice()
    assert grammar.fit(PROMPT, tuple(ids_of("ab")), 4) in ((), tuple(ids_of("ab")))


def test_the_checks_of_a_step_have_a_time(forms: Forms) -> None:
    ticks = iter(range(1000))
    # Each draft takes 0.5 of DRAFTS_S, and 0.25 of DRAFTS_S passes between two drafts.
    grammars = DraftForms(forms, cpu_clock=lambda: 0.25 * DRAFTS_S * next(ticks))
    three = [core_grammar(grammars, form_params({"regex": "[ab]{9}"})) for _ in range(3)]
    draft = tuple(ids_of("ab"))
    for _ in range(2):
        grammars.begin_step()
        assert [grammar.fit(PROMPT, draft, 4) for grammar in three] == [draft, draft, ()]
