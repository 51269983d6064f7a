"""Grammars over the tokens of the tiny tokenizer, whose tokens include every printable character."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.grammar.matcher import Matcher
from rayloom_engine.grammar.vocabulary import Vocabulary
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.tokenizer import Tokenizer
from rt_tiny import VOCAB_SIZE, tiny_tokenizer

EOS = 2


@functools.cache
def token_folder() -> Path:
    """A folder with the tiny tokenizer."""
    return tiny_tokenizer(Path(tempfile.mkdtemp(prefix="rayloom-tokens-")))


@functools.cache
def tiny_vocabulary() -> Vocabulary:
    return Vocabulary.load(token_folder(), VOCAB_SIZE, (EOS,))


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(token_folder())


def ids_of(text: str) -> list[int]:
    return _tokenizer().encode(text, add_special_tokens=False)


def matcher_of(form: StructuredOutputs) -> Matcher:
    return Matcher.build(tiny_vocabulary(), grammar_of(form))


def accepts(form: StructuredOutputs, text: str) -> bool:
    """True if the whole text matches the form."""
    matcher = matcher_of(form)
    return matcher.num_accepted(ids_of(text)) == len(ids_of(text)) and _ends(matcher, text)


def _ends(matcher: Matcher, text: str) -> bool:
    matcher.advance(ids_of(text))
    return matcher.is_accepting
