"""Overtaking: a sequence that waits for blocks does not hold up smaller ones, and does not starve because of them.

A waiting sequence may be overtaken until `max_overtakers` sequences have done so, or until those have together as many
tokens as it has itself. From then on nobody behind it is admitted before it.
"""

from __future__ import annotations

from rayloom_engine.core.sequence import Sequence

# A step looks for room for so many sequences at most before it leaves the rest of the queue to later steps.
_MAX_HELD = 8


class Line:
    """Who was passed over while one step reads the waiting queue, and who may still be admitted behind them."""

    def __init__(self, max_overtakers: int) -> None:
        self._max_overtakers = max_overtakers
        self._held: list[Sequence] = []

    @property
    def is_closed(self) -> bool:
        """Whether nobody else may be admitted, whatever its size."""
        return len(self._held) >= _MAX_HELD or any(self._allowance(sequence) <= 0 for sequence in self._held)

    def may_pass(self, sequence: Sequence) -> bool:
        """Whether `sequence` may be admitted before all those that are held."""
        return all(sequence.num_tokens <= self._allowance(held) for held in self._held)

    def hold(self, sequence: Sequence) -> None:
        """`sequence` finds no room in this step, or may not overtake those that find none."""
        self._held.append(sequence)

    def passed(self, sequence: Sequence) -> None:
        """`sequence` was admitted; everybody who is held was overtaken by it."""
        for held in self._held:
            held.num_overtakers += 1
            held.num_overtaking_tokens += sequence.num_tokens

    def _allowance(self, held: Sequence) -> int:
        """Tokens that may still overtake `held`."""
        if held.num_overtakers >= self._max_overtakers:
            return 0
        return held.num_tokens - held.num_overtaking_tokens
