"""bad_words, allowed_token_ids and logprob_token_ids: the tokens that a rank may choose, and those that `LLM` chooses.

The C library's sampler is compared with the reference in test_cpu_sampler.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine import LLM, SamplingParams
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot
from rayloom_engine.errors import RequestError
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.bad_words import MAX_SEQUENCES, bad_word_ids
from rayloom_engine.text.tokenizer import Tokenizer
from rayloom_engine.worker.bad_word_index import BadWordIndex
from rayloom_engine.worker.bans import all_banned_ids, mask_slot
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.sampler import adjust_logits, token_logprobs
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.wanted_logprobs import with_tokens
from rt_byte_model import byte_model
from rt_forms import EOS, ids_of, tiny_vocabulary
from rt_slots import make_slot
from rt_tiny import VOCAB_SIZE, tiny_checkpoint, tiny_tokenizer

VOCAB = 10
IDS = st.lists(st.integers(0, 3), max_size=8)


def banned(**params) -> list[int]:
    ids = all_banned_ids(make_slot(**params), VOCAB)
    return [] if ids is None else sorted(set(ids.tolist()))


@pytest.mark.parametrize(
    ("generated", "expected"),
    [
        ((), (5,)),
        ((7,), (5, 8)),
        ((7, 8), (5, 9)),
        ((7, 7), (5, 8)),
        ((8, 7, 3), (5,)),
    ],
)
def test_a_word_is_banned_at_its_last_token(generated: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = ((5,), (7, 8), (7, 8, 9))
    assert BadWordIndex(words).completed(np.array(generated, dtype=np.int64)) == expected


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5), IDS)
def test_exactly_the_tokens_that_would_complete_a_word_are_banned(words: list[tuple[int, ...]], ids: list[int]) -> None:
    found = set(BadWordIndex(tuple(words)).completed(np.array(ids, dtype=np.int64)))
    assert found == {new for new in range(4) if any((*ids, new)[-len(word) :] == word for word in words)}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5), IDS)
def test_a_slot_bans_the_same_tokens_while_it_grows(words: list[tuple[int, ...]], ids: list[int]) -> None:
    slot = make_slot(bad_words=tuple(words))
    for length, token_id in enumerate((*ids, 0)):
        generated = tuple(ids[:length])
        plain = {new for new in range(4) if any((*generated, new)[-len(word) :] == word for word in words)}
        assert set(slot.banned_ids) == plain
        assert slot.banned_ids is slot.banned_ids, "computed once for each new token"
        slot.append_tokens((token_id,))


def test_a_slot_looks_only_at_words_whose_last_token_but_one_is_the_newest() -> None:
    class Word(tuple[int, ...]):
        num_looks = 0

        def __getitem__(self, key: Any) -> Any:
            Word.num_looks += 1
            return super().__getitem__(key)

    index = BadWordIndex((*(Word((first, 9, 5)) for first in range(100)), Word((8, 6))))
    Word.num_looks = 0
    assert index.completed(np.array([1, 2, 8], dtype=np.int64)) == (6,)
    assert Word.num_looks == 2, "the other tokens and the last token of one word"


def test_the_sampler_adds_no_ban_to_the_mask_of_a_form() -> None:
    slot = make_slot(eos=(4,), min_tokens=1)
    slot.allowed = np.array([0b10000], dtype=np.int32)  # only the end token: the form is complete before min_tokens
    logits = torch.zeros(VOCAB)
    adjust_logits(logits, slot)
    assert logits.isfinite().nonzero().flatten().tolist() == [4]


def test_bans_count_in_every_step_of_a_form_and_after_a_replay() -> None:
    forms = Forms(tiny_vocabulary)
    (b,) = ids_of("b")
    grammar = grammar_of(StructuredOutputs(regex="a(a|b)*"))
    params = DecodingParams(max_tokens=9, grammar=grammar, bad_words=((b,),))

    def slot_after(text: str) -> Slot:
        new = NewSlot(
            slot=0,
            request_id="r",
            token_ids=(0, *ids_of(text)),
            num_prompt_tokens=1,
            block_table=(),
            params=params,
            eos_token_ids=(EOS,),
        )
        return Slot(new, None, forms)

    def allows_b(slot: Slot) -> bool:
        mask_slot(slot, VOCAB_SIZE)
        assert slot.allowed is not None
        return bool(slot.allowed[b // 32] >> (b % 32) & 1)

    slot = slot_after("")
    assert not allows_b(slot)
    for text in ("a", "aa", "aaa"):
        slot.append_tokens(tuple(ids_of("a")))
        assert not allows_b(slot)
        assert slot.allowed is not None
        replayed = slot_after(text)
        assert not allows_b(replayed)
        assert replayed.allowed is not None
        assert replayed.allowed.tolist() == slot.allowed.tolist()


def test_bans_count_where_the_text_before_a_form_is_masked() -> None:
    forms = Forms(tiny_vocabulary)
    structured = StructuredOutputs(regex="a", after="ab")
    form = forms.begin(DecodingParams(max_tokens=9, grammar=grammar_of(structured), grammar_after="ab"))
    form.append(ids_of("a"))
    (banned_id,) = ids_of("a")
    mask = form.allowed((banned_id,))
    assert mask is None or not mask[banned_id // 32] >> (banned_id % 32) & 1


def test_allowed_tokens_and_a_form_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="cannot be combined"):
        SamplingParams(allowed_token_ids=[1], structured_outputs=StructuredOutputs(choice=("a", "b")))


def test_words_are_looked_for_in_the_answer_and_not_in_the_prompt() -> None:
    assert banned(prompt=(7,), generated=(), bad_words=((7, 8),)) == []
    assert banned(prompt=(7,), generated=(7,), bad_words=((7, 8),)) == [8]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"allowed_token_ids": (2, 4)}, [0, 1, 3, 5, 6, 7, 8, 9]),
        ({"allowed_token_ids": (2, 4), "bad_words": ((4,),)}, [0, 1, 3, 4, 5, 6, 7, 8, 9]),
        ({"allowed_token_ids": (4,), "bad_words": ((4,),)}, [0, 1, 2, 3, 5, 6, 7, 8, 9]),  # the ban of 4 has no effect
        ({"eos": (4,), "min_tokens": 1, "allowed_token_ids": (4,)}, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        ({"bad_words": tuple((token_id,) for token_id in range(VOCAB))}, []),  # bans of all tokens have no effect
        ({"eos": (4,), "min_tokens": 1, "bad_words": ((3,),)}, [3, 4]),
        ({"eos": (4,), "min_tokens": 1, "generated": (1,)}, []),
        ({"eos": (40,), "min_tokens": 1}, []),  # the end token is not in the vocabulary
        ({}, []),
    ],
)
def test_bans_leave_a_token(params: dict, expected: list[int]) -> None:
    assert banned(**params) == expected


def test_given_tokens_have_the_log_probabilities_of_the_whole_vocabulary() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(4.0)]])  # probabilities 1/8, 3/8, 1/2
    (entry,) = token_logprobs(logits, [2], [0])
    assert with_tokens(entry, (1, 2, 0), logits[0, [2, 1, 2, 0]].tolist()).top == (
        (2, pytest.approx(math.log(1 / 2))),
        (1, pytest.approx(math.log(3 / 8))),
        (0, pytest.approx(math.log(1 / 8))),
    )


def test_words_are_banned_at_the_beginning_and_after_a_blank(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_model(tmp_path))
    # Every byte is a token, and so is the blank: " cat" ends with the same tokens as "cat".
    assert bad_word_ids(tokenizer, ["cat", " cat"]) == (tuple(b"cat"),)
    assert bad_word_ids(tokenizer, []) == ()
    words = [chr(0x4E00 + number) for number in range(MAX_SEQUENCES + 1)]
    with pytest.raises(RequestError, match="fewer words"):
        bad_word_ids(tokenizer, words)


def test_words_with_a_token_of_their_own_after_a_blank_are_banned_in_both_forms() -> None:
    class Spelling:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return {"cat": [1, 2], " cat": [3], "": []}[text]

    assert bad_word_ids(Spelling(), ["cat"]) == ((1, 2), (3,))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no tokens"):
        bad_word_ids(Spelling(), [" "])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"bad_words": "cat"}, "bad_words"),
        ({"bad_words": ["cat", 1]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 20_000]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 0}, "logprob_token_ids"),
    ],
)
def test_bad_values_are_refused_with_the_name(settings: dict, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    params = SamplingParams(logprobs=0, **{name: [3, 99]})
    with pytest.raises(RequestError, match=f"{name} has token id 99"):
        params.decoding(0, 1, 100, 50, 0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")
    tiny_tokenizer(folder)
    with LLM(str(folder), dtype="float32", num_kv_blocks=100, threads=1) as llm:
        yield llm


def test_an_answer_obeys_the_bans(llm: LLM) -> None:
    def ask(**settings) -> tuple[int, ...]:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **settings)
        return llm.generate([[5, 17, 33]], params, use_tqdm=False)[0].outputs[0].token_ids

    free = ask()
    assert set(ask(allowed_token_ids=[60, 61])) <= {60, 61}
    word = llm.tokenizer.decode(free[:1])
    ids = bad_word_ids(llm.tokenizer, [word])
    assert ids == (free[:1],)
    assert free[0] not in ask(bad_words=[word])


def test_given_tokens_are_the_alternatives_of_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0, logprob_token_ids=[9, 200], ignore_eos=True)
    (output,) = llm.generate([[5, 17, 33]], params, use_tqdm=False)
    for entry in output.outputs[0].logprobs:
        assert [token_id for token_id, _ in entry.top] == [entry.token_id, 9, 200]
        assert all(logprob <= entry.logprob for _, logprob in entry.top)
