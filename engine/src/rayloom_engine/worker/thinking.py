"""Thinking: counts the tokens of an answer's reasoning, and forces its end tag once the budget is spent.

Thinking and reasoning are the same part of an answer; the request's field is `thinking_token_budget`. Like the state of
a form, the state depends on the generated ids alone, so a replay restores it without a message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from rayloom_engine.core.decoding import ThinkingBudget
from rayloom_engine.grammar.matcher import Mask

_BLANKS = b" \t\r\n"


class _Place(Enum):
    """The position of the next token: before, inside or after the reasoning."""

    BEFORE = "before"
    INSIDE = "inside"
    OVER = "over"


class Thinking:
    """The progress of one sequence through its reasoning."""

    def __init__(self, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: returns the bytes that a token id adds to the text; may raise GrammarFault."""
        self._budget = budget
        self._token_bytes = token_bytes
        self._start = budget.start.encode()
        self._ends = tuple(end.encode() for end in budget.ends)
        self._num_kept = max(map(len, self._ends)) - 1
        self._waiting: list[int] = []  # ids that are not counted yet
        self._place = _Place.BEFORE if budget.start else _Place.INSIDE
        self._text = b""  # before the reasoning: the answer without its first blanks; inside: the last bytes
        self._num_tokens = 0  # tokens of the reasoning, forced tokens included
        self._num_forced = 0  # tokens of end_ids that were generated so far

    def copy(self) -> Thinking:
        """Returns an independent object in the same state."""
        copied = copy.copy(self)
        copied._waiting = list(self._waiting)
        return copied

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds generated ids."""
        self._waiting += token_ids

    def forced(self) -> int | None:
        """Returns the only token that may come next; None if the budget forces none. May raise GrammarFault."""
        if self._place is not _Place.OVER:
            for token_id in self._waiting:
                self._advance(token_id)
        self._waiting = []
        return self._budget.end_ids[self._num_forced] if self._is_spent else None

    @property
    def _is_spent(self) -> bool:
        return self._place is _Place.INSIDE and self._num_tokens >= self._budget.num_tokens

    def _advance(self, token_id: int) -> None:
        if self._place is _Place.OVER:
            return
        if self._place is _Place.BEFORE:
            self._begin(self._text + self._token_bytes(token_id))
            return
        is_forced = self._is_spent and token_id == self._budget.end_ids[self._num_forced]
        self._num_forced = self._num_forced + 1 if is_forced else 0
        self._num_tokens += 1
        self._read(self._text + self._token_bytes(token_id))
        if self._num_forced == len(self._budget.end_ids):
            self._place = _Place.OVER

    def _begin(self, text: bytes) -> None:
        text = text.lstrip(_BLANKS)
        if text.startswith(self._start):
            self._place = _Place.INSIDE
            self._read(text[len(self._start) :])
        elif self._start.startswith(text):
            self._text = text
        else:
            self._place = _Place.OVER

    def _read(self, text: bytes) -> None:
        if any(end in text for end in self._ends):
            self._place = _Place.OVER
        self._text = text[max(0, len(text) - self._num_kept) :]


def mask_of(token_id: int, vocab_size: int) -> Mask:
    """Returns a mask that allows one token."""
    mask: Mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    mask.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)
    return mask
