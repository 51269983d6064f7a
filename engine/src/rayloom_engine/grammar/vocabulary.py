"""Vocabulary: the tokens of a model, for llguidance and for the text before a form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayloom_engine.common.process import return_free_memory
from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.validate import shortened

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The tokens of a model, in the form that llguidance needs.

    Built once in a process: reading 49,152 tokens takes 0.15 s, and other Python code hardly runs during this time.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(tokenizer.eos_tokens)
        self.num_words = (tokenizer.vocab_size + 31) // 32  # 32-bit words of a mask

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Returns the vocabulary of a model folder. `vocab_size`: the model's; the tokenizer may have more tokens.

        Raises GrammarFault if llguidance cannot use the tokenizer.
        """
        from llguidance import LLTokenizer

        eos = list(eos_token_ids) or None
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            try:
                plain = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos, slices=[])
            except ValueError as error:
                if "too small" not in str(error):
                    raise
                plain = LLTokenizer(text, eos_token=eos, slices=[])
            # A separate call, so that other threads can acquire the GIL before and after it.
            whole = plain.with_slices(LLTokenizer.general_slices())
        except (OSError, ValueError) as error:
            raise GrammarFault(
                f"this model's tokenizer cannot be used for structured output: {shortened(str(error))}"
            ) from error
        del plain
        return_free_memory()  # reading the vocabulary needs a third more memory than the result
        return cls(whole)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text. For a special token, these are the bytes of its name."""
        return bytes(self.tokenizer.decode_bytes([token_id]))
