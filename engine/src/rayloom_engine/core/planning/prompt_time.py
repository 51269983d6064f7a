"""PromptTime: how many tokens of prompts a step may compute beside its decodes within a given time."""

from __future__ import annotations

from math import sqrt

from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.core.window import num_seen

# Every step may compute this many tokens of prompts, however long they take, so that no prompt starves.
LEAST_TOKENS = 8


class PromptTime:
    """The time of one step that is left for tokens of prompts. Pure: the costs are passed in as numbers."""

    def __init__(self, costs: StepSeconds, seconds: float, window: int | None = None) -> None:
        """`seconds`: by how many seconds prompts may lengthen the step (backlog.py). `window`: as in StepWork."""
        self._costs = costs
        self._left_s = seconds
        self._num_tokens = 0  # tokens of prompts in the step so far
        self._window = window

    def most(self, start: int) -> int:
        """Returns how many tokens of a prompt, from position `start` on, may still be added to the step."""
        pair_s = self._costs.pair_s
        first_s = self._costs.token_s + pair_s * num_seen(start, self._window)
        left_s = max(0.0, self._left_s)
        # The largest n with n x first_s + n x n x pair_s <= left_s. The quadratic formula is written so that it also
        # holds for pair_s = 0.
        divisor = first_s + sqrt(first_s * first_s + 4 * pair_s * left_s)
        return max(0, LEAST_TOKENS - self._num_tokens, int(2 * left_s / divisor))

    def spend(self, start: int, num: int) -> None:
        """Adds `num` tokens of a prompt to the step. The first of these tokens is at position `start`."""
        self._left_s -= self._seconds(start, num)
        self._num_tokens += num

    def give_back(self, start: int, num: int) -> None:
        """Undoes `spend` with the same numbers, because the step does not compute these tokens after all."""
        self._left_s += self._seconds(start, num)
        self._num_tokens -= num

    def _seconds(self, start: int, num: int) -> float:
        num_pairs = num * (num_seen(start, self._window) + num)
        return num * self._costs.token_s + num_pairs * self._costs.pair_s
