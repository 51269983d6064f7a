"""A rank's use of grammars: masks, end tokens, the text before a form, replays, and grammars that fail."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.grammar.matcher import Mask, Matcher
from rayloom_engine.grammar.preamble import Endings, Preamble
from rayloom_engine.grammar.vocabulary import Vocabulary
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.worker.builds import Builds
from rayloom_engine.worker.forms import Form, Forms
from rayloom_engine.worker.slots import SlotTable
from rt_forms import EOS, ids_of, matcher_of, tiny_vocabulary, token_folder

# The library can parse this grammar but not build it: the product of its three automata is too large.
TOO_COMPLEX = "start: A\nA: /(.*a.{20})/ & /(.*b.{20})/ & ~/(.*c.{20})/"


@pytest.fixture(scope="module")
def forms() -> Forms:
    return Forms(tiny_vocabulary)


def _texts(mask: Mask | None) -> str | None:
    """The allowed tokens in the order of their ids; an end token is "$"."""
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return "".join(
        "$" if token_id == EOS else tiny_vocabulary().token_bytes(int(token_id)).decode() for token_id in ids
    )


def _form(forms: Forms, generated: str = "", after: str = "", **form) -> Form:
    structured = StructuredOutputs(after=after, **form)
    begun = forms.begin(DecodingParams(max_tokens=50, grammar=grammar_of(structured), grammar_after=after))
    begun.append(ids_of(generated))
    return begun


def test_a_rank_that_computes_does_not_load_the_vocabulary() -> None:
    loaded = threading.Event()
    forms = Forms(lambda: (loaded.set(), tiny_vocabulary())[1])
    progress = iter((1, 2, 3, 4, 4))
    seen: list[int] = []

    def advance() -> int:
        assert not loaded.is_set()
        seen.append(next(progress))
        return seen[-1]

    forms.load_when_idle(advance, quiet_s=0.001)
    forms.load_when_idle(lambda: pytest.fail("only the first call counts"), quiet_s=0.001)
    assert loaded.wait(30)
    assert seen == [1, 2, 3, 4, 4]


def test_the_first_form_loads_the_vocabulary_and_no_later_one_does() -> None:
    loads: list[int] = []
    forms = Forms(lambda: (loads.append(1), tiny_vocabulary())[1])
    forms.load_when_idle(lambda: object())  # never idle
    assert loads == []
    assert _texts(_form(forms, regex="a").allowed(())) == "a"
    assert _texts(_form(forms, regex="b").allowed(())) == "b"
    assert loads == [1]


def test_the_end_is_allowed_exactly_where_the_form_is_complete(forms: Forms) -> None:
    form = _form(forms, regex="ab?")
    allowed = []
    for text in ("", "a", "b"):
        form.append(ids_of(text))
        allowed.append(_texts(form.allowed(())))
    assert allowed == ["a", "$b", "$"]


def test_end_tokens_after_the_end_change_nothing(forms: Forms) -> None:
    form = _form(forms, "a", regex="a")
    form.append([EOS, EOS])  # possible with ignore_eos
    assert _texts(form.allowed(())) == "$"


def test_banned_tokens_are_left_out_unless_nothing_else_is_allowed(forms: Forms) -> None:
    form = _form(forms, "a", regex="ab?")
    assert _texts(form.allowed((EOS,))) == "b"
    form.append(ids_of("b"))
    assert _texts(form.allowed((EOS,))) == "$"


def test_a_replay_allows_the_same_tokens(forms: Forms) -> None:
    text = '{"name":"Ada","tags":["x"'
    step_by_step = _form(forms, json_object=True)
    for char in text:
        step_by_step.allowed(())
        step_by_step.append(ids_of(char))
    replayed = _form(forms, text, json_object=True)
    assert _texts(replayed.allowed(())) == _texts(step_by_step.allowed(()))


def test_sequences_with_the_same_grammar_do_not_share_a_state(forms: Forms) -> None:
    first, second = _form(forms, "a", regex="abc"), _form(forms, regex="abc")
    assert (_texts(first.allowed(())), _texts(second.allowed(()))) == ("b", "a")


def test_a_form_begins_behind_its_text(forms: Forms) -> None:
    form = _form(forms, after="</t>", regex="[12]")
    assert form.allowed(()) is None
    for text, allowed in (("I </", None), ("t<", None), ("/t", None), (">", "12"), ("1", "$")):
        form.append(ids_of(text))
        assert _texts(form.allowed(())) == allowed
    # After a replay the form finds the text `after` again.
    assert _texts(_form(forms, "x</t>", after="</t>", regex="[12]").allowed(())) == "12"


class _Words(Vocabulary):
    """A vocabulary of given tokens."""

    def __init__(self, *words: bytes) -> None:
        super().__init__(tiny_vocabulary().tokenizer)
        self._words = dict(enumerate(words))

    def token_bytes(self, token_id: int) -> bytes:
        return self._words.get(token_id, b"")


def test_no_token_completes_the_text_and_begins_the_form() -> None:
    words = _Words(b"</t", b">", b">x", b">\n\n", b"</t>x", b"</t>", b"t>y")
    endings = Endings(words, "</t>")
    preamble = Preamble(endings)
    mask = np.zeros(words.num_words, dtype=np.int32)

    def banned() -> set[int]:
        return {n for n in range(7) if preamble.fill(mask) and not mask[0] >> n & 1}

    assert banned() == {4}
    preamble.advance((0,))
    assert banned() == {2, 4}
    assert preamble.advance((3, 5)) == (5,)
    assert preamble.is_over


def test_tokens_are_taken_back() -> None:
    matcher = matcher_of(StructuredOutputs(regex="abc"))
    matcher.advance(ids_of("abc"))
    assert matcher.is_accepting and matcher.is_complete
    matcher.rollback(2)
    assert matcher.num_accepted(ids_of("bcc")) == 2
    assert not matcher.is_accepting


def test_a_grammar_that_cannot_be_built_is_a_fault_of_its_sequence(forms: Forms) -> None:
    broken = _form(forms, lark=TOO_COMPLEX)
    for _ in range(2):
        with pytest.raises(GrammarFault, match="fuel exhausted"):
            broken.allowed(())
    assert _texts(_form(forms, regex="a").allowed(())) == "a"


def test_a_token_that_the_grammar_had_refused_is_a_fault(forms: Forms) -> None:
    with pytest.raises(GrammarFault):
        _form(forms, "b", regex="a").allowed(())


def test_a_special_token_that_the_vocabulary_lacks_is_named(forms: Forms) -> None:
    with pytest.raises(GrammarFault, match='unknown special token: "<think>"'):
        _form(forms, lark="start: <think>").allowed(())


def test_a_tokenizer_that_cannot_be_used_fails_only_sequences_with_a_form(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    forms = Forms(lambda: Vocabulary.load(tmp_path, 256, (EOS,)))
    with pytest.raises(GrammarFault, match="this model's tokenizer cannot be used for structured output"):
        _form(forms, regex="a").allowed(())


def test_a_fault_of_the_library_is_a_fault_of_the_sequence() -> None:
    def fail() -> Matcher:
        raise MemoryError

    builds = Builds()
    with pytest.raises(GrammarFault, match="MemoryError"):
        Form(builds, builds.start(tiny_vocabulary), builds.start(fail), None, may_follow_ahead=True).allowed(())


def test_a_model_may_have_more_tokens_than_its_tokenizer_or_fewer() -> None:
    assert Vocabulary.load(token_folder(), 300, (EOS,)).num_words == 10
    assert Vocabulary.load(token_folder(), 100, (EOS,)).num_words == 8


def test_choices_of_a_prompt_get_the_grammar_from_its_first_slot(forms: Forms) -> None:
    grammar = grammar_of(StructuredOutputs(regex="a"))
    params = DecodingParams(max_tokens=5, grammar=grammar)
    first = NewSlot(
        slot=0, request_id="a", token_ids=(5, 6), num_prompt_tokens=2, block_table=(0,), params=params, eos_token_ids=()
    )
    second = NewSlot(
        slot=1,
        request_id="b",
        token_ids=tuple(ids_of("a")),
        num_prompt_tokens=2,
        block_table=(0,),
        prompt_of=0,
        has_grammar_of_prompt=True,
        params=DecodingParams(max_tokens=5),
        eos_token_ids=(),
    )
    table = SlotTable(1, forms)
    steps = tuple(SlotStep(slot=slot, start=0, num_tokens=1) for slot in (0, 1))
    slots = [slot for _, slot in table.apply(StepPlan(step_id=1, epoch=1, new_slots=(first, second), slots=steps))]
    assert [_texts(slot.form.allowed(())) for slot in slots] == ["a", "$"]
    assert slots[1].params.grammar == grammar
