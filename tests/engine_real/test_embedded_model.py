"""The embedded model has the right tokens and shape, answers a question, and obeys a grammar with many choices.

test_against_transformers.py compares the model's tokens one by one with those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.grammar.matcher import Matcher
from rayloom_engine.grammar.validate import validate_here
from rayloom_engine.grammar.vocabulary import Vocabulary
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape
from rayloom_engine.structured_outputs import MAX_CHOICES, StructuredOutputs
from rt_tiny import TinySequence, advance, load_tiny, make_cache


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("builtin://smollm2-135m").path


@pytest.mark.parametrize(
    ("text", "ids", "tokens"),
    [
        # The tokenizer first separates each digit, and only then splits the rest. So the two blanks stay together.
        ("a  12", [81, 256, 33, 34], ["a", "ĠĠ", "1", "2"]),
        ("Hello, world! 24", [19556, 28, 905, 17, 216, 34, 36], ["Hello", ",", "Ġworld", "!", "Ġ", "2", "4"]),
        # No token is inserted before a text, and the names of special tokens in a text become special tokens.
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2], ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]),
        (" it's", [357, 506], ["Ġit", "'s"]),
        ("\n\n\tx", [1116, 197, 104], ["ĊĊ", "ĉ", "x"]),
        ("", [], []),
    ],
)
def test_texts_have_known_tokens(folder: Path, text: str, ids: list[int], tokens: list[str]) -> None:
    from tokenizers import Tokenizer

    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text)
    assert (encoding.ids, encoding.tokens) == (ids, tokens)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The tokenizer as transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["naïve 日本語 🙂", "x = [1,  2]\n\tfor i in x: pass", "1e-05 ½ ٣", "don't  stop "])
def test_transformers_reads_the_same_tokenizer(folder: Path, theirs: Any, text: str) -> None:
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert ours.decode(ours.encode(text).ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 2, 0)


def test_the_shape_is_that_of_smollm2(folder: Path) -> None:
    shape = read_shape(folder)
    assert shape.architecture == "LlamaForCausalLM"
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (30, 576, 9, 3)
    assert (shape.head_dim, shape.vocab_size, shape.max_position_embeddings) == (64, 49152, 8192)
    assert (shape.rope.theta, shape.rms_norm_eps, shape.checkpoint_dtype) == (100000.0, 1e-5, "bfloat16")
    assert shape.tie_word_embeddings and shape.eos_token_ids == (2,)
    assert shape.num_parameters == 134_515_008
    assert shape.kv_bytes_per_token(4) == 46_080


def test_the_capital_of_france_is_paris(folder: Path, theirs: Any) -> None:
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    prompt = theirs.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")
    token_ids = theirs(prompt)["input_ids"]

    model = load_tiny(folder)
    cache = make_cache(model.shape, num_blocks=8, block_size=16)
    sequence = TinySequence(token_ids, block_table=[5, 2, 7, 1])
    answer: list[int] = []
    while len(answer) < 10 and 2 not in answer:
        (logits,) = advance(model, cache, [(sequence, len(token_ids) - sequence.num_computed)])
        answer.append(int(torch.argmax(logits[-1])))
        token_ids.append(answer[-1])
    assert theirs.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(("word", "num_choices"), [("", MAX_CHOICES), ("choice ", 4_000)])
def test_many_choices_are_enforced(folder: Path, word: str, num_choices: int) -> None:
    from tokenizers import Tokenizer

    choices = [f"{word}{number}" for number in range(num_choices)]
    grammar = grammar_of(StructuredOutputs(choice=choices))
    assert validate_here(grammar, "structured_outputs") == ()
    vocabulary = Vocabulary.load(folder, read_shape(folder).vocab_size, (2,))
    matcher = Matcher.build(vocabulary, grammar)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    mask = np.zeros(vocabulary.num_words, dtype=np.int32)
    for text, is_choice in (
        (choices[0], True),
        (choices[-1], True),
        (f"{word}{num_choices}", False),
        (f"{word}7 ", False),
    ):
        each = matcher.copy()
        ids = tokenizer.encode(text).ids
        num_accepted = each.num_accepted(ids)
        for token_id in ids[:num_accepted]:
            each.fill(mask)
            assert mask[token_id // 32] >> (token_id % 32) & 1
            each.advance([token_id])
        assert (num_accepted == len(ids) and each.is_accepting) is is_choice
