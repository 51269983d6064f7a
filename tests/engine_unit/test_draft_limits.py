"""Hostile grammars of sequences with drafts: limits of time, and grammars that get no drafts."""

from __future__ import annotations

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import SlotStep
from rayloom_engine.grammar.matcher import may_follow_ahead
from rayloom_engine.worker.draft_forms import DRAFTS_S, DraftForms
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.masks import MASKS_S, Masks
from rt_draft_masks import PROMPT, TOO_COMPLEX, core_grammar, draft_step, fitted, form_params, set_masks, texts_of
from rt_forms import ids_of, tiny_vocabulary
from rt_tiny import VOCAB_SIZE


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(tiny_vocabulary)


def test_a_sequence_with_a_costly_grammar_gets_no_more_drafts(forms: Forms) -> None:
    grammars = DraftForms(forms)
    grammar = core_grammar(grammars, form_params({"regex": "ba{60000}c"}))
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
    grammar = core_grammar(grammars, form_params({"lark": AMBIGUOUS}))
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
    long = draft_step(forms, 0, form_params({"lark": AMBIGUOUS}), "acc", "ab" * 40)
    short = draft_step(forms, 1, form_params({"regex": "[ab]{9}"}), "ab")
    found = masks.set([short, long], is_whole_step=True)
    assert (found.postponed, found.broken, found.after_drafts[0]) == ({0}, {}, [])
    assert texts_of(short[1].allowed) == "ab"
    while 0 in found.postponed:
        found = masks.set([long], is_whole_step=True)
    assert texts_of(long[1].allowed) == "abc"
    assert found.broken == {}


def test_after_a_draft_that_cannot_be_taken_back_the_answer_is_read_again_in_the_time_of_masks(forms: Forms) -> None:
    ticks = iter(range(1000))
    pair = draft_step(
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
    assert set_masks(forms, pair).broken == {}
    slot.append_tokens(tuple(ids_of("a")))
    masks = Masks(forms, VOCAB_SIZE, cpu_clock=lambda: 0.1 * MASKS_S * next(ticks))
    num_postponed = 0
    while 0 in masks.set([pair], is_whole_step=True).postponed:
        num_postponed += 1
    assert num_postponed == 8
    assert texts_of(slot.allowed) == "c"


@pytest.mark.parametrize("attribute", ["lazy", "max_tokens=2", 'capture, stop="c"', 'suffix="b"'])
def test_a_grammar_that_cuts_tokens_gets_no_drafts(forms: Forms, attribute: str) -> None:
    params = form_params({"lark": f'start: "x" t "y"\nt[{attribute}]: /a*b/'})
    pair = draft_step(forms, 0, params, "x")
    assert set_masks(forms, pair).after_drafts[0] == []
    assert fitted(DraftForms(forms), {"lark": params.grammar}, "", "x") == ""


def test_a_draft_of_a_grammar_that_cuts_tokens_changes_no_later_mask(forms: Forms) -> None:
    params = form_params({"lark": 'start: r t r\nr: "a" /[ab]+/ "{"\nt[stop="c"]: "aa"'})
    pair = draft_step(forms, 0, params, "ab{a")
    for text, allowed in (("a", "ab"), ("a", "ab{")):
        assert set_masks(forms, pair).broken == {}
        pair[1].append_tokens(tuple(ids_of(text)))
        assert set_masks(forms, (SlotStep(slot=0, start=0, num_tokens=1, samples=True), pair[1])).broken == {}
        assert texts_of(pair[1].allowed) == allowed


@pytest.mark.parametrize("form", [{"json": {"required": ["stop", "lazy"]}}, {"regex": "[ab]c"}, {"choice": ["a[b]"]}])
def test_other_grammars_get_drafts(form: dict[str, object]) -> None:
    assert may_follow_ahead(form_params(form).grammar)
