"""Decides the time and level of the next fault of a soak. Pure.

| level | at the earliest |
|---|---|
| process | PROCESS_S after the last fault |
| pod | POD_S after the last fault of a pod or a node, once all engines and gateways are ready |
| node | NODE_S after the last fault of a node, once all engines and gateways are ready |
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Level = Literal["process", "pod", "node"]

PROCESS_S, POD_S, NODE_S = 30.0, 120.0, 300.0
FAULTS: dict[Level, tuple[str, ...]] = {
    "process": ("a core is killed", "a rank is killed"),
    "pod": ("a head pod is deleted", "a worker pod is deleted", "a gateway is killed"),
    "node": ("a node is lost",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    level: Level
    what: str


class FaultPlan:
    """Draws faults at random from a seed. The same seed and the same times of calls give the same faults."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # nosec: not for secrets
        self._last: dict[Level, float] = dict.fromkeys(FAULTS, 0.0)

    def due(self, now_s: float, *, is_whole: bool) -> Fault | None:
        """Returns the fault to cause now, `now_s` seconds after the start of the soak, or None.

        Later calls assume that the caller has caused the returned fault.
        """
        level = self._level(now_s, is_whole)
        if level is None:
            return None
        self._last[level] = now_s
        return Fault(level, self._rng.choice(FAULTS[level]))

    def _level(self, now_s: float, is_whole: bool) -> Level | None:
        of_pods = max(self._last["pod"], self._last["node"])
        if is_whole and now_s - self._last["node"] >= NODE_S:
            return "node"
        if is_whole and now_s - of_pods >= POD_S:
            return "pod"
        return "process" if now_s - max(self._last.values()) >= PROCESS_S else None
