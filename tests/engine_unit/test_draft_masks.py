"""Drafts of sequences with a grammar or a limit of reasoning: the mask of each row, and the state after a draft."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.step import NewSlot, SlotStep
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.grammar.matcher import Mask, may_follow_ahead
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.worker.draft_forms import DRAFTS_S, DraftForm, DraftForms
from rayloom_engine.worker.forms import Form, Forms
from rayloom_engine.worker.masks import MASKS_S, Masks, StepMasks
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.verification import accepted_rows, sampled_slots
from rt_forms import EOS, ids_of, tiny_vocabulary
from rt_tiny import VOCAB_SIZE

PROMPT = (5, 6)
# After "b" this grammar needs more items than the parser may have.
TOO_COMPLEX = "\n".join(
    (
        'start: "a" "c" | "b" (x | y)',
        *(f"{rule}: " + " | ".join(f'"{rule}{n}"' for n in range(1500)) for rule in "xy"),
    )
)


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(tiny_vocabulary)


def _texts(mask: Mask | None) -> str | None:
    """The allowed tokens in the order of their ids; an end token is "$"."""
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return "".join("$" if number == EOS else tiny_vocabulary().token_bytes(int(number)).decode() for number in ids)


def _params(form: dict[str, object], **other: object) -> DecodingParams:
    after = str(form.get("after", ""))
    grammar = grammar_of(StructuredOutputs(**form)) if form else ""
    return DecodingParams(max_tokens=50, grammar=grammar, grammar_after=after, **other)


def _pair(
    forms: Forms, number: int, params: DecodingParams, draft: str | tuple[int, ...], generated: str = ""
) -> tuple[SlotStep, Slot]:
    """A step of a slot with a draft."""
    new = NewSlot(
        slot=number,
        request_id=f"{number}",
        token_ids=(*PROMPT, *ids_of(generated)),
        num_prompt_tokens=len(PROMPT),
        block_table=(0,),
        params=params,
        eos_token_ids=(EOS,),
    )
    slot = Slot(new, forms=forms)
    while slot.form is not None and not slot.form.is_built:
        slot.form.wait_a_slice()
    while not forms.is_built:
        forms.wait_a_slice()
    ids = tuple(ids_of(draft)) if isinstance(draft, str) else draft
    slot.write_draft(ids)
    start = slot.num_tokens - 1
    return SlotStep(slot=number, start=start, num_tokens=1 + len(ids), draft_token_ids=ids, samples=True), slot


def _set(forms: Forms, *pairs: tuple[SlotStep, Slot]) -> StepMasks:
    return Masks(forms, VOCAB_SIZE).set(pairs, is_whole_step=True)


def _rows(forms: Forms, params: DecodingParams, draft: str | tuple[int, ...], generated: str = "") -> list[str | None]:
    """The allowed tokens of each row that has a mask."""
    pair = _pair(forms, 0, params, draft, generated)
    found = _set(forms, pair)
    assert found.broken == {}
    return [_texts(slot.allowed) for slot in (pair[1], *found.after_drafts[0])]


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
    assert _rows(forms, _params(form), draft, generated) == expected


def test_the_end_may_be_drafted_and_nothing_else_follows_it(forms: Forms) -> None:
    assert _rows(forms, _params({"regex": "ab?"}), (*ids_of("a"), EOS, EOS)) == ["a", "$b", "$", "$"]
    assert _rows(forms, _params({"regex": "ab?"}), (*ids_of("a"), EOS, *ids_of("b"))) == ["a", "$b", "$"]


def test_the_bans_of_a_row_count_the_tokens_of_the_draft(forms: Forms) -> None:
    least = _params({"regex": "a*"}, min_tokens=2)
    assert _rows(forms, least, "aa") == ["a", "a", "$a"]
    no_double_b = _params({"regex": "[ab]*c"}, bad_words=(tuple(ids_of("bb")),))
    assert _rows(forms, no_double_b, "abab") == ["abc", "abc", "ac", "abc", "ac"]
    assert _rows(forms, no_double_b, "abbc") == ["abc", "abc", "ac"]


def test_a_limit_of_reasoning_forces_tokens_inside_a_draft(forms: Forms) -> None:
    budget = ThinkingBudget(num_tokens=3, start="", ends=("</t>",), end_ids=tuple(ids_of("</t>")))
    thinking = _params({}, thinking=budget)
    assert _rows(forms, thinking, "bc</t>!", "a") == [None, None, "<", "/", "t", ">", None, None]
    assert _rows(forms, thinking, "bcd", "a") == [None, None, "<"]
    assert _rows(forms, thinking, "x</", "ab") == [None, "<", "/", "t"]
    both = _params({"regex": "12", "after": "</t>"}, thinking=budget)
    assert _rows(forms, both, "bc</t>12", "a") == [None, None, "<", "/", "t", ">", "1", "2", "$"]


def test_a_draft_leaves_the_state_of_its_slot_as_it_was(forms: Forms) -> None:
    budget = ThinkingBudget(num_tokens=2, start="", ends=("</t>",), end_ids=tuple(ids_of("</t>")))
    params = _params({"regex": "12|13", "after": "</t>"}, thinking=budget)
    pair = _pair(forms, 0, params, "b</t>12")
    slot = pair[1]
    for sampled, allowed in (("a", None), ("b", "<"), ("<", "/"), ("/", "t"), ("t", ">"), (">", "1"), ("1", "23")):
        _set(forms, pair)
        slot.append_tokens(tuple(ids_of(sampled)))
        assert _set(forms, (SlotStep(slot=0, start=0, num_tokens=1, samples=True), slot)).broken == {}
        assert _texts(slot.allowed) == allowed


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
    params = _params({**form, "after": after})
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
    pair = _pair(forms, 0, params, "bx")
    for _ in range(2):  # the second time, a copy of the matcher follows the draft
        found = _set(forms, pair)
        assert (found.broken, found.after_drafts[0], _texts(pair[1].allowed)) == ({}, [], "ab")
    pair[1].append_tokens(tuple(ids_of("a")))
    assert _set(forms, pair).broken == {}
    assert _texts(pair[1].allowed) == "c"
    (step, slot) = _pair(forms, 0, params, "x", "b")
    assert "max is 2000" in _set(forms, (step, slot)).broken[0].message


def test_drafts_get_masks_in_the_time_that_the_other_masks_leave(forms: Forms) -> None:
    ticks = iter(range(1000))
    # Each mask takes 0.3 of MASKS_S: three slots get theirs, and one row of one draft.
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=lambda: 0.3 * MASKS_S * next(ticks))
    pairs = [_pair(forms, number, _params({"regex": "[ab]{9}"}), "ab") for number in range(3)]
    found = masks.set(pairs, is_whole_step=True)
    assert found.postponed == set()
    assert {number: len(rows) for number, rows in found.after_drafts.items()} == {0: 1, 1: 0, 2: 0}
    plain = (SlotStep(slot=5, start=1, num_tokens=1, samples=True), pairs[0][1])
    assert masks.set([plain], is_whole_step=True).after_drafts == {}


def test_a_slot_whose_mask_is_late_has_no_row_of_its_draft(forms: Forms) -> None:
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=iter((0.0, 1.0, 1.0)).__next__)
    pairs = [_pair(forms, number, _params({"regex": "[ab]{9}"}), "ab") for number in range(2)]
    found = masks.set(pairs, is_whole_step=True)
    assert (found.postponed, found.after_drafts) == ({1}, {0: [], 1: []})


def test_rows_without_a_mask_are_computed_but_never_count(forms: Forms) -> None:
    pair = _pair(forms, 0, _params({"regex": "ab?c"}), "axc")
    found = _set(forms, pair)
    slots = sampled_slots([pair], found.after_drafts)
    assert [_texts(slot.allowed) for slot in slots] == ["a", "bc", None, None]
    assert [slot.num_tokens for slot in slots] == [2, 3, 4, 5]
    a, b, c, x = ids_of("abcx")
    assert accepted_rows((a, x, c), [a, b, c, 7], num_verified=1).num_tokens == 2
    assert accepted_rows((a, x, c), [a, x, c, 7], num_verified=1).num_tokens == 2, "whatever the row without a mask has"
    dirty = accepted_rows((a, x, c), [a, b, None, 7], num_verified=1)
    assert (dirty.num_tokens, dirty.is_dirty) == (2, True)


def _grammar(forms: DraftForms, params: DecodingParams) -> DraftForm:
    """The core's grammar of a sequence, after it was built."""
    grammar = forms.begin(params, len(PROMPT))
    while not grammar._form.is_built:
        grammar._form.wait_a_slice()
    return grammar


def _fit(forms: DraftForms, form: dict[str, object], generated: str, draft: str, num: int = 9) -> str:
    grammar = _grammar(forms, _params(form))
    forms.begin_step()
    ids = grammar.fit([*PROMPT, *ids_of(generated)], tuple(ids_of(draft)), num)
    return "".join(tiny_vocabulary().token_bytes(token_id).decode() for token_id in ids)


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
    assert _fit(DraftForms(forms), form, generated, draft) == expected


def test_forced_text_is_no_longer_than_a_draft_may_be(forms: Forms) -> None:
    assert _fit(DraftForms(forms), {"choice": ["abcdef", "x"]}, "a", "", num=3) == "bcd"


def test_the_grammar_of_the_core_follows_the_answer(forms: Forms) -> None:
    grammar = _grammar(DraftForms(forms), _params({"regex": "(ab|c)*d"}))
    ids = list(PROMPT)
    for text, forced in (("a", "b"), ("bcca", "b"), ("bd", "")):
        ids += ids_of(text)
        assert grammar.fit(ids, (), 4) == tuple(ids_of(forced))
    assert grammar.fit(ids, tuple(ids_of("a")), 4) == ()


def test_a_grammar_that_is_not_built_gives_no_draft_and_the_wait_counts() -> None:
    has_begun, gate = threading.Event(), threading.Event()
    slow = Forms(lambda: has_begun.set() or (tiny_vocabulary() if gate.wait(60) else None))
    grammar = DraftForms(slow).begin(_params({"regex": "ab"}), len(PROMPT))
    assert has_begun.wait(60)
    slow._builds._wall_s = 0.0  # the first counted wait gives the build up
    assert grammar.fit(PROMPT, tuple(ids_of("ab")), 4) == ()
    assert slow._vocabulary.given_up, "the wait was counted"
    gate.set()
    while not grammar._form.is_built:
        grammar._form.wait_a_slice()
    assert grammar.fit(PROMPT, tuple(ids_of("ab")), 4) in ((), tuple(ids_of("ab")))


def test_the_checks_of_a_step_have_a_time(forms: Forms) -> None:
    ticks = iter(range(1000))
    # Each draft takes 0.5 of DRAFTS_S, and a quarter passes between two drafts.
    grammars = DraftForms(forms, cpu_clock=lambda: 0.25 * DRAFTS_S * next(ticks))
    three = [_grammar(grammars, _params({"regex": "[ab]{9}"})) for _ in range(3)]
    draft = tuple(ids_of("ab"))
    for _ in range(2):
        grammars.begin_step()
        assert [grammar.fit(PROMPT, draft, 4) for grammar in three] == [draft, draft, ()]


def test_a_sequence_with_a_costly_grammar_gets_no_more_drafts(forms: Forms) -> None:
    grammars = DraftForms(forms)
    grammar = _grammar(grammars, _params({"regex": "ba{60000}c"}))
    grammars.begin_step()
    ids = [*PROMPT, *ids_of("b")]
    assert grammar.fit(ids, (), 4) == tuple(ids_of("aaaa")), "the forced text has 60,001 bytes"
    grammars.begin_step()
    assert grammar.fit([*ids, *ids_of("a")], (), 4) == ()
    assert grammar.fit([*ids, *ids_of("aa")], tuple(ids_of("aa")), 4) == ()


# Each further token takes longer: the 300th takes 5 ms.
AMBIGUOUS = 'start: s "c"\ns: s s s | s s | "a" | "b"'


def test_the_core_reads_a_long_answer_in_several_steps(forms: Forms) -> None:
    ticks = iter(range(1000))
    grammars = DraftForms(forms, cpu_clock=lambda: 0.1 * DRAFTS_S * next(ticks))
    grammar = _grammar(grammars, _params({"lark": AMBIGUOUS}))
    ids = [*PROMPT, *ids_of("ab" * 40)]
    num_steps, found = 0, ()
    while not found:
        num_steps += 1
        grammars.begin_step()
        found = grammar.fit(ids, tuple(ids_of("acc")), 4)
    assert (found, num_steps) == (tuple(ids_of("ac")), 8)


def test_a_rank_reads_a_long_answer_in_several_steps_and_postpones_only_its_slot(forms: Forms) -> None:
    ticks = iter(range(1000))
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=lambda: 0.1 * MASKS_S * next(ticks))
    long = _pair(forms, 0, _params({"lark": AMBIGUOUS}), "acc", "ab" * 40)
    short = _pair(forms, 1, _params({"regex": "[ab]{9}"}), "ab")
    found = masks.set([short, long], is_whole_step=True)
    assert (found.postponed, found.broken, found.after_drafts[0]) == ({0}, {}, [])
    assert _texts(short[1].allowed) == "ab"
    while 0 in found.postponed:
        found = masks.set([long], is_whole_step=True)
    assert _texts(long[1].allowed) == "abc"
    assert found.broken == {}


def test_after_a_draft_that_cannot_be_taken_back_the_answer_is_read_again_in_the_time_of_masks(forms: Forms) -> None:
    ticks = iter(range(1000))
    pair = _pair(
        forms,
        0,
        DecodingParams(
            max_tokens=99,
            grammar=TOO_COMPLEX.replace("start:", "start: /[ab]{80}/ (", 1).replace("(x | y)", "(x | y))", 1),
        ),
        "bx",
        "ab" * 40,
    )
    slot = pair[1]
    assert _set(forms, pair).broken == {}
    slot.append_tokens(tuple(ids_of("a")))
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=lambda: 0.1 * MASKS_S * next(ticks))
    num_postponed = 0
    while 0 in masks.set([pair], is_whole_step=True).postponed:
        num_postponed += 1
    assert num_postponed == 8
    assert _texts(slot.allowed) == "c"


@pytest.mark.parametrize("attribute", ["lazy", "max_tokens=2", 'capture, stop="c"', 'suffix="b"'])
def test_a_grammar_that_cuts_tokens_gets_no_drafts(forms: Forms, attribute: str) -> None:
    params = _params({"lark": f'start: "x" t "y"\nt[{attribute}]: /a*b/'})
    pair = _pair(forms, 0, params, "x")
    assert _set(forms, pair).after_drafts[0] == []
    assert _fit(DraftForms(forms), {"lark": params.grammar}, "", "x") == ""


def test_a_draft_of_a_grammar_that_cuts_tokens_changes_no_later_mask(forms: Forms) -> None:
    params = _params({"lark": 'start: r t r\nr: "a" /[ab]+/ "{"\nt[stop="c"]: "aa"'})
    pair = _pair(forms, 0, params, "ab{a")
    for text, allowed in (("a", "ab"), ("a", "ab{")):
        assert _set(forms, pair).broken == {}
        pair[1].append_tokens(tuple(ids_of(text)))
        assert _set(forms, (SlotStep(slot=0, start=0, num_tokens=1, samples=True), pair[1])).broken == {}
        assert _texts(pair[1].allowed) == allowed


@pytest.mark.parametrize("form", [{"json": {"required": ["stop", "lazy"]}}, {"regex": "[ab]c"}, {"choice": ["a[b]"]}])
def test_other_grammars_get_drafts(form: dict[str, object]) -> None:
    assert may_follow_ahead(_params(form).grammar)
