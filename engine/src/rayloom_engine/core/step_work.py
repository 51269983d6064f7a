"""StepForecast: the time of a step, from its arithmetic and the best measured speed.

The patience with a rank depends on it: a layer computes a chunk of 4,096 tokens thousands of times as long as a decode.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rayloom_engine.core.step import StepPlan

# With fewer tokens a step mostly reads weights (from disk in the first step), so its speed says little of arithmetic.
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Cost of a step's tokens in one pipeline stage, in floating-point operations."""

    flops_per_token: float = 0.0  # 2 for every parameter of the stage
    flops_per_pair: float = 0.0  # of a token and a position that it attends to, all layers of the stage together
    num_layers: int = 1  # of the stage
    window: int | None = None  # positions that a token sees at most; None: all

    def flops(self, plan: StepPlan) -> float:
        """Operations of the whole step. Masked positions of a chunk count, because kernels compute them too."""
        pairs = sum(step.num_tokens * (self._num_seen(step.start) + step.num_tokens) for step in plan.slots)
        return self.flops_per_token * plan.num_tokens + self.flops_per_pair * pairs

    def _num_seen(self, start: int) -> int:
        return start if self.window is None else min(start, self.window)


class StepForecast:
    """Forecast of the plans in flight. Measures the speed of large steps, and of small ones before the first."""

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._plans: deque[tuple[float, bool]] = deque()  # (flops, is large) of the plans in flight, oldest first
        self._best_speed = 0.0  # floating-point operations a second
        self._is_large = False  # whether a large step had that speed

    @property
    def layer_s(self) -> float:
        """Seconds that a layer of the largest plan in flight takes at the best speed; 0 while no speed is known.

        The speed is that of large steps. Small steps wait for memory and make the forecast far too long; before the
        first large step there is no better one, and `patience_s` limits the effect.
        """
        if not self._plans or not self._best_speed:
            return 0.0
        return max(flops for flops, _ in self._plans) / self._best_speed / self._work.num_layers

    def submitted(self, plan: StepPlan) -> None:
        self._plans.append((self._work.flops(plan), plan.num_tokens >= _LEAST_TOKENS))

    def ended(self, seconds: float) -> None:
        """Removes the oldest plan in flight, which took the model `seconds`."""
        flops, is_large = self._plans.popleft()
        if seconds <= 0 or (self._is_large and not is_large):
            return
        if is_large and not self._is_large:
            self._is_large = True
            self._best_speed = 0.0
        self._best_speed = max(self._best_speed, flops / seconds)

    def forget(self) -> None:
        """Removes all plans in flight; the measured speed stays."""
        self._plans.clear()
