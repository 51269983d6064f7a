"""The scaler's input: the settings of the spec, and the engines at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rayloom_operator.decide.scaling.load import NOTHING_HELD, Held, ServiceLoad
from rayloom_operator.decide.scaling.windows import Sample

SCALER = "rayloom-operator-scaler"  # field manager of the scaler's writes


class RolloutActivity(Enum):
    """The activity of the rollout planner. The scaler adds engines only in SETTLED and STOPPED."""

    SETTLED = "settled"  # the planner does nothing, or creates or deletes engines of one revision
    ROLLING = "rolling"  # the planner replaces engines
    STOPPED = "stopped"  # a rollout is paused or halted: engines of two revisions stay
    WAITING = "waiting"  # an engine is unschedulable: no node has room for one of its pods


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The part of the spec that the scaler uses."""

    least: int
    most: int
    idle_s: float
    is_raised: bool = False  # `least` is 1 instead of 0, because no gateway pod holds requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines of a service at one moment."""

    replicas: int  # spec.replicas
    num_available: int
    num_for_load: int  # number of engines that should exist; unproven engines are not counted
    # Engines of a new revision that have no requests. The revision is not promoted yet, or its rollout is stopped.
    # These engines stay if `replicas` becomes less.
    num_unproven: int = 0
    num_surge: int = 0  # number of unproven engines that maxSurge allows in addition to `replicas`
    num_unschedulable: int = 0  # unschedulable engines except unproven ones; terminated first if `replicas` falls
    rollout: RolloutActivity
    load: ServiceLoad
    samples: tuple[Sample, ...]  # samples since the last change of `replicas`, up to the present sample
    held: Held = NOTHING_HELD
    idle_s: float = 0.0  # seconds for which every reconcile of this process has found the service idle
    writer: str = ""  # the field manager that set `replicas`; empty if the stored state has the same number

    @property
    def has_all(self) -> bool:
        """True if at least `num_for_load` engines are available."""
        return self.num_available >= self.num_for_load

    @property
    def has_all_with_nodes(self) -> bool:
        """True if at least `num_for_load` engines are available or unschedulable."""
        return self.num_available + self.num_unschedulable >= self.num_for_load

    def replicas_for_more(self, number: int) -> int:
        """Returns the `replicas` that gives `number` engines for the load. `number` is larger than `num_for_load`."""
        return number + self.num_unproven

    def replicas_for_fewer(self, number: int) -> int:
        """Returns the `replicas` that gives `number` engines for the load. `number` is smaller than `num_for_load`."""
        return number + self.num_unproven - self.num_surge
