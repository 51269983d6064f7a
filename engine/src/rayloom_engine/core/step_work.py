"""Forecast of a step: its arithmetic, and how long that takes at the best speed that was seen.

The watch of a rank depends on how long a part of a step may take: a chunk of 4,096 tokens keeps a layer busy thousands
of times as long as a decode.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayloom_engine.core.step import StepPlan

# Fewer tokens wait for the weights to be read, from the disk in the first step, and say little of arithmetic.
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What the tokens of a step cost one pipeline stage, in floating-point operations."""

    flops_per_token: float = 0.0  # 2 for every parameter of the stage
    flops_per_pair: float = 0.0  # of a token and a position that it attends to, all layers of the stage together
    num_layers: int = 1  # of the stage
    window: int | None = None  # positions that a token sees at most; None: all

    def flops(self, plan: StepPlan) -> float:
        """Of the whole step. Masked positions of a chunk count, because kernels compute them too."""
        pairs = sum(step.num_tokens * (self._num_seen(step.start) + step.num_tokens) for step in plan.slots)
        return self.flops_per_token * plan.num_tokens + self.flops_per_pair * pairs

    def _num_seen(self, start: int) -> int:
        return start if self.window is None else min(start, self.window)


class StepForecast:
    """Of the plans in flight. Learns the speed from large steps that end, and from small ones until then."""

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._plans: deque[tuple[float, bool]] = deque()  # (flops, is large) of the plans in flight, oldest first
        self._best_speed = 0.0  # floating-point operations a second
        self._is_large = False  # whether a large step had that speed

    @property
    def layer_s(self) -> float:
        """Seconds that a layer of the largest plan in flight takes at the best speed; 0 while no speed is known.

        The best speed is that of large steps. Small ones wait for memory and make the forecast far too long; before the
        first large step there is nothing better, and `patience_s` bounds the wait.
        """
        if not self._plans or not self._best_speed:
            return 0.0
        return max(flops for flops, _ in self._plans) / self._best_speed / self._work.num_layers

    def submitted(self, plan: StepPlan) -> None:
        self._plans.append((self._work.flops(plan), plan.num_tokens >= _LEAST_TOKENS))

    def ended(self, seconds: float) -> None:
        """The oldest plan in flight took the model `seconds`."""
        flops, is_large = self._plans.popleft()
        if seconds <= 0 or (self._is_large and not is_large):
            return
        if is_large and not self._is_large:
            self._is_large = True
            self._best_speed = 0.0
        self._best_speed = max(self._best_speed, flops / seconds)

    def forget(self) -> None:
        """The plans in flight are lost; the speed stays."""
        self._plans.clear()
