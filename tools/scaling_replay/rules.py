"""The rules that choose the number of engines: a fixed fleet, Knative's KPA, and the operator's own scaler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Protocol

from rayloom_operator.api.autoscaling.state import ScalingState
from rayloom_operator.decide.scaling.inputs import Bounds, Fleet, RolloutActivity
from rayloom_operator.decide.scaling.load import Held, load_of
from rayloom_operator.decide.scaling.scaler import decide_scaling
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.times import Now
from scaling_replay.engine import SimulatedEngine

LOOK_S = 2.0
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
_NOTHING = Held()


class Rule(Protocol):
    name: str

    def number(self, engines: Sequence[SimulatedEngine], now: float) -> int:
        """Returns the number of engines from now on. `engines`: serving and starting engines, but no leaving ones."""


class Fixed:
    def __init__(self, replicas: int) -> None:
        self.name = f"fixed fleet of {replicas}"
        self._replicas = replicas

    def number(self, engines: Sequence[SimulatedEngine], now: float) -> int:
        return self._replicas


class Kpa:
    """Knative's rule: the number of engines follows from the mean concurrency over 60 s, and in a panic also over 6 s.

    https://knative.dev/docs/serving/autoscaling/kpa-specific/. A panic begins when the mean over 6 s needs at least
    twice the ready engines. The panic ends when the mean has been below this bound for 60 s. In a panic the number only
    rises.
    """

    def __init__(self, target: float, most: int) -> None:
        self.name = f"KPA, {target:g} requests per engine"
        self._target = target
        self._most = most
        self._seen: deque[tuple[float, int]] = deque()
        self._panic_at = float("-inf")
        self._highest = 0

    def number(self, engines: Sequence[SimulatedEngine], now: float) -> int:
        concurrency = sum(each.num_running + len(each.waiting) for each in engines)
        self._seen.append((now, concurrency))
        while self._seen[0][0] <= now - 60:
            self._seen.popleft()
        num_ready = max(1, sum(each.ready_at <= now for each in engines))
        recent = [number for at, number in self._seen if at > now - 6]
        sudden = ceil(sum(recent) / len(recent) / self._target)
        stable = ceil(sum(number for _, number in self._seen) / len(self._seen) / self._target)
        if sudden >= 2 * num_ready:
            self._panic_at = now
        if now - self._panic_at < 60:
            self._highest = max(self._highest, sudden, stable, len(engines))
            wanted = self._highest
        else:
            self._highest = 0
            wanted = max(stable, num_ready // 2)
        return min(max(wanted, 1), self._most)


class Scaler:
    """The operator's scaler."""

    name = "the operator's scaler"

    def __init__(self, most: int, ttft_s: float) -> None:
        self._bounds = Bounds(least=1, most=most, idle_s=600)
        self._ttft_s = ttft_s
        self._state = ScalingState()
        self._samples: list[Sample] = []
        self.num_changes = 0

    def number(self, engines: Sequence[SimulatedEngine], now: float) -> int:
        load = load_of([each.load(now) for each in engines], _NOTHING, self._ttft_s)
        self._samples.append(Sample(now, load.engines, load.is_complete))
        fleet = Fleet(
            replicas=len(engines),
            num_for_load=len(engines),
            num_available=sum(each.ready_at <= now for each in engines),
            rollout=RolloutActivity.SETTLED,
            load=load,
            samples=tuple(self._samples),
        )
        clock = Now(_BEGIN + timedelta(seconds=now), now)
        found = decide_scaling(self._bounds, self._state, fleet, Windows(), clock)
        self._state = found.state
        if found.write is None:
            return len(engines)
        self._samples = []
        self.num_changes += 1
        return found.write
