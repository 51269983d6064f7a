"""Detokenizer: turns token ids into text as they arrive, never with half a character.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) map each token to bytes, so an incremental UTF-8 decoder is
exact, at a constant cost per token. In other vocabularies (SentencePiece), the text of a token depends on its
neighbours. So for each new token, a short window of the last tokens is decoded again.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from rayloom_engine.text.tokenizer import REPLACEMENT, Tokenizer

# The most tokens that are held back while they decode to an incomplete character. A UTF-8 character has at most 4
# bytes, and a token has at least one byte. So if 8 tokens form no character, their bytes are invalid.
MAX_HELD_TOKENS = 8


class Detokenizer(Protocol):
    """The state of decoding one text. A new detokenizer that gets the same ids reaches the same state."""

    def add(self, token_id: int) -> str:
        """Returns the characters that `token_id` completes."""

    def finish(self) -> str:
        """Returns the rest of the text: U+FFFD for held bytes that form no whole character."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    kept_ids: Collection[int] = (),
) -> Detokenizer:
    """Returns a detokenizer for the text after `prompt_ids`, of which only the last few matter.

    `kept_ids`: special tokens that are not skipped, because a parser reads them.
    """

    skipped_ids = tokenizer.special_ids.difference(kept_ids) if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skipped_ids)
    return WindowDetokenizer(tokenizer, prompt_ids, skipped_ids)


class ByteDetokenizer:
    """Decodes byte-level vocabularies. The joined pieces equal the result of Tokenizer.decode for all ids."""

    __slots__ = ("_is_between", "_skipped_ids", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # the decoder holds no bytes, so the text ends with a whole character

    def add(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        if self._is_between:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes all other vocabularies, by decoding a window of the last tokens. Returns only the text that is new.

    The text of the window's first `_num_read` tokens was returned already. The text of its other tokens is held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        # A SentencePiece decoder strips the blank before a text's first word, so let the window begin with the prompt's
        # last tokens.
        self._window = [token_id for token_id in prompt_ids[-5:] if token_id not in skipped_ids]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)

    def add(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_read < MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._read_text) :]
        # The tokens whose text is returned now become the context of the next tokens.
        self._window = self._window[self._num_read :] or self._window
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
