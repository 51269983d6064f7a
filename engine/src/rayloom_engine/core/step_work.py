"""StepForecast: forecasts the time of a step from its number of operations and the best measured speed.

The time after which a rank counts as hung depends on this forecast, because a chunk of 4,096 tokens spends thousands of
times as long in a layer as a decode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rayloom_engine.core.step import SlotStep, StepPlan
from rayloom_engine.core.window import num_seen

# From this number of tokens on, a step counts as large. A smaller step mostly reads weights (the engine's first step
# reads them from disk), so its time says little about arithmetic.
_LEAST_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The number of floating-point operations that a step's tokens need in one pipeline stage."""

    flops_per_token: float = 0.0  # a multiplication and an addition for each parameter of the stage
    # operations for a token and one position that it attends to, in all layers of the stage
    flops_per_pair: float = 0.0
    num_layers: int = 1  # layers of the stage
    window: int | None = None  # a token attends to at most this many positions; None: all

    def flops(self, steps: Iterable[SlotStep]) -> float:
        """Operations of these parts of a step. Masked positions in a chunk count, because kernels compute them too."""
        num_tokens = 0
        num_pairs = 0
        for step in steps:
            num = step.num_tokens
            num_tokens += num
            num_pairs += num * (num_seen(step.start, self.window) + num)
        return self.flops_per_token * num_tokens + self.flops_per_pair * num_pairs


class StepForecast:
    """Forecasts how long plans in flight take, from the best measured speed.

    The speed is measured in large steps, and in small steps only until the first large step has ended.
    """

    def __init__(self, work: StepWork) -> None:
        self._work = work
        self._plans: deque[tuple[float, bool]] = deque()  # (flops, is large) of the plans in flight, oldest first
        self._best_speed = 0.0  # floating-point operations a second
        self._is_large = False  # True if `_best_speed` was measured in a large step

    @property
    def layer_s(self) -> float:
        """Seconds that the largest plan in flight takes in one layer at the best speed; 0 while no speed is known.

        Before the first large step, only the speed of small steps is known. Memory reads limit small steps, so the
        forecast is then far too long; `patience_s` in stillness.py limits the effect.
        """
        if not self._plans or not self._best_speed:
            return 0.0
        return max(flops for flops, _ in self._plans) / self._best_speed / self._work.num_layers

    def submitted(self, plan: StepPlan) -> None:
        self._plans.append((self._work.flops(plan.slots), plan.num_tokens >= _LEAST_TOKENS))

    def ended(self, seconds: float) -> None:
        """Removes the oldest plan in flight. `seconds`: the time of its forward pass."""
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
