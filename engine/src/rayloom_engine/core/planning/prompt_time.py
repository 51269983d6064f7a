"""PromptTime: how many tokens of prompts a step computes beside its decodes, by the time that these tokens take.

Without a limit, a step with decodes and a chunk of 512 tokens takes twenty to forty times as long as one with the
decodes alone on a CPU, and for so long every running answer stands still.
"""

from __future__ import annotations

from math import sqrt

from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.core.window import num_seen

# Tokens of prompts make a step longer by at most this part of the time of its decodes. So the time between two tokens
# of an answer stays below twice its usual value, although the times of steps scatter.
_SHARE = 0.7
# A step always computes this many tokens of prompts, whatever they cost, so that no prompt starves.
LEAST_TOKENS = 8


def crowd_of(num_decodes: int) -> int:
    """Returns how many prompts must wait beside `num_decodes` decodes for the limit to be lifted.

    With the limit, prompts wait longer and decodes less, and a step computes fewer tokens for each weight that it
    reads. From this number on, all requests together would be served later with it.
    """
    return max(2, -(-num_decodes // 3))


class PromptTime:
    """The time of one step that is left for tokens of prompts. Pure: the costs come in as numbers."""

    def __init__(self, costs: StepSeconds, num_decodes: int, window: int | None = None) -> None:
        """`num_decodes`: decodes of the step, at least 1. `window`: as in StepWork."""
        self._costs = costs
        self._left_s = _SHARE * costs.decode_s(num_decodes)
        self._least = LEAST_TOKENS
        self._window = window

    def most(self, start: int) -> int:
        """Returns how many tokens of a prompt, from position `start` on, may still be added to the step."""
        pair_s = self._costs.pair_s
        first_s = self._costs.token_s + pair_s * num_seen(start, self._window)
        left_s = max(0.0, self._left_s)
        # The largest n with n x first_s + n x n x pair_s <= left_s, in the form that also holds for pair_s = 0.
        divisor = first_s + sqrt(first_s * first_s + 4 * pair_s * left_s)
        return max(self._least, int(2 * left_s / divisor))

    def spend(self, start: int, num: int) -> None:
        """Counts `num` tokens of a prompt, from position `start` on, that the step computes."""
        num_pairs = num * (num_seen(start, self._window) + num)
        self._left_s -= num * self._costs.token_s + num_pairs * self._costs.pair_s
        self._least = max(0, self._least - num)
