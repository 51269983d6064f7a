"""Overtaking: smaller sequences may be admitted before one that waits for blocks, and cannot starve it.

A waiting sequence may be overtaken until `max_overtakers` sequences have done so, or until these have together as many
tokens as the waiting one. From then on no sequence behind it is admitted before it.
"""

from __future__ import annotations

from rayloom_engine.core.sequence import Sequence

# A step tries to place so many sequences without room at most; later steps read the rest of the queue.
_MAX_HELD = 8


class Line:
    """The sequences that one step's reading of the waiting queue has held, and the check of those behind them."""

    def __init__(self, max_overtakers: int) -> None:
        self._max_overtakers = max_overtakers
        self._held: list[Sequence] = []

    @property
    def is_closed(self) -> bool:
        """True if no further sequence may be admitted, whatever its size."""
        return len(self._held) >= _MAX_HELD or any(self._allowance(sequence) <= 0 for sequence in self._held)

    def may_pass(self, sequence: Sequence) -> bool:
        """True if `sequence` may be admitted before all held ones."""
        return all(sequence.num_tokens <= self._allowance(held) for held in self._held)

    def hold(self, sequence: Sequence) -> None:
        """Adds a sequence without room in this step, or one that may not overtake those without room."""
        self._held.append(sequence)

    def passed(self, sequence: Sequence) -> None:
        """Counts the admission of `sequence`, which has overtaken all held ones."""
        for held in self._held:
            held.num_overtakers += 1
            held.num_overtaking_tokens += sequence.num_tokens

    def _allowance(self, held: Sequence) -> int:
        """Tokens that may still overtake `held`."""
        if held.num_overtakers >= self._max_overtakers:
            return 0
        return held.num_tokens - held.num_overtaking_tokens
