"""Thinking: counts the tokens of an answer's reasoning, and forces its end tag once the budget is spent.

Thinking and reasoning are the same part of an answer; the request's field is `thinking_token_budget`. Like the state of
a form, the state depends on the generated ids alone, so a replay restores it without a message.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np

from rayloom_engine.core.decoding import ThinkingBudget
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.text.message_parsing.call_start import begins_call
from rayloom_engine.text.message_parsing.tool_formats import TOOL_FORMATS

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
        self._calls = TOOL_FORMATS.get(budget.calls)
        self._num_kept = max(map(len, self._ends)) - 1
        self._is_uncertain = False  # the next tokens show whether a call has ended the reasoning
        self._waiting: list[int] = []  # ids that are not counted yet
        self._place = _Place.BEFORE if budget.start else _Place.INSIDE
        # Before the reasoning: the answer without its first blanks. Inside: the last bytes; while uncertain, the bytes
        # from an opener on.
        self._text = b""
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
        # A forced token would destroy the call that may have begun. It comes once it is certain that there is none,
        # after MAX_START_CHARS at most.
        is_inside = self._place is _Place.INSIDE and not self._is_uncertain
        return is_inside and self._num_tokens >= self._budget.num_tokens

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
        at = 0
        self._is_uncertain = False
        while found := self._first_end(text, at):
            start, end = found
            ends = self._does_end(text[start:], end)
            if ends is None:
                self._is_uncertain = True
                self._text = text[start:]
                return
            if ends:
                self._place = _Place.OVER
                return
            at = start + len(end)
        self._text = text[max(at, len(text) - self._num_kept) :]

    def _first_end(self, text: bytes, at: int) -> tuple[int, bytes] | None:
        """Returns position and text of the first end in `text`, from `at` on; None if there is none."""
        found = [(start, end) for end in self._ends if (start := text.find(end, at)) >= 0]
        return min(found, key=lambda each: (each[0], -len(each[1])), default=None)

    def _does_end(self, text: bytes, end: bytes) -> bool | None:
        """Returns whether `end`, with which `text` begins, ends the reasoning; None if more text must show it."""
        if self._calls is None or end == self._ends[0]:
            return True
        is_bare = end.decode() in self._calls.bare_openers
        rest = text if is_bare else text[len(end) :]
        # The decoder leaves out a character whose last bytes are missing.
        return begins_call(codecs.getincrementaldecoder("utf-8")("replace").decode(rest), self._calls)


def mask_of(token_id: int, vocab_size: int) -> Mask:
    """Returns a mask that allows one token."""
    mask: Mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    mask.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)
    return mask
