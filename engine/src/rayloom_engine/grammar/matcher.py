"""Matcher: consumes the tokens of one answer, and computes which tokens the grammar allows next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.llguidance_limits import parser_limits
from rayloom_engine.grammar.validate import shortened
from rayloom_engine.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# If a rule has an attribute in _CUTTING, llguidance cuts a token at the end of the rule. The matcher may then be wrong,
# or panic, after it has followed tokens that are not part of the answer.
_ATTRIBUTES = re.compile(r"\w\s*\[")
_CUTTING = re.compile(r"\b(?:lazy|max_tokens|stop|suffix)\b")

Mask = npt.NDArray[np.int32]  # bit i of word w is 1 if token 32 * w + i is allowed


def may_follow_ahead(grammar: str) -> bool:
    """True if a matcher of this grammar may follow the tokens of a draft, which may be wrong."""
    begin = _ATTRIBUTES.search(grammar)
    return begin is None or _CUTTING.search(grammar, begin.end()) is None


class Matcher:
    """The state of a grammar after the tokens that the matcher has consumed."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        """Use `build` instead."""
        self._vocabulary = vocabulary
        self._matcher = matcher

    @classmethod
    def build(cls, vocabulary: Vocabulary, grammar: str) -> Matcher:
        """Returns a matcher at the beginning of an answer. Raises GrammarFault.

        Call it on a thread with a deep stack. Construction does not hold the interpreter lock.
        """
        from llguidance import LLMatcher

        matcher = cls(vocabulary, LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits()))
        matcher._check()
        return matcher

    def copy(self) -> Matcher:
        """Returns an independent matcher in the same state."""
        return Matcher(self._vocabulary, self._matcher.deep_copy())

    @property
    def is_accepting(self) -> bool:
        """True if the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """True if the answer has to end here."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_ids: Sequence[int]) -> int:
        """Consumes tokens and returns their number. End tokens after the end are ignored, so they do not count.

        Raises GrammarFault for a token that is not allowed.
        """
        ends = self._vocabulary.end_token_ids
        num_consumed = 0
        for token_id in token_ids:
            if self._matcher.is_stopped() and token_id in ends and not self._matcher.is_error():
                continue
            if not self._matcher.consume_token(token_id):
                self._check()
                raise GrammarFault("the grammar refused a token that it had allowed")
            num_consumed += 1
        return num_consumed

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens, from the first token on, the grammar accepts in a row. Changes nothing."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def forced(self) -> list[int]:
        """Returns tokens of the text with which the grammar forces the answer to go on; [] if it forces no text.

        The grammar allows these tokens. It may allow other tokens of the same text, too.
        """
        return [int(token_id) for token_id in self._matcher.compute_ff_tokens()]

    def rollback(self, num_tokens: int) -> None:
        """Undoes the consumption of the last tokens. Raises GrammarFault if fewer tokens were consumed."""
        if not self._matcher.rollback(num_tokens):
            self._check()
            raise GrammarFault(f"{num_tokens} tokens cannot be taken back")

    def fill(self, mask: Mask) -> None:
        """Writes the allowed tokens to `mask`. An end token is allowed if and only if the answer may end here.

        Raises GrammarFault if the grammar is too complex, or allows no token.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if np.count_nonzero(mask) == 0:  # takes a quarter of the time of any()
            raise GrammarFault("no token of the model's vocabulary fits the grammar here")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault(shortened(self._matcher.get_error()))
