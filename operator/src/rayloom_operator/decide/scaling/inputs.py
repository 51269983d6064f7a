"""The scaler's input: the settings of the spec, and the engines at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rayloom_operator.decide.scaling.load import NOTHING_HELD, Held, ServiceLoad
from rayloom_operator.decide.scaling.windows import Sample

SCALER = "rayloom-operator-scaler"  # field manager of the scaler's writes


class RolloutActivity(Enum):
    """The activity of the rollout planner. The scaler adds engines only in SETTLED and STOPPED."""

    SETTLED = "settled"  # nothing, or it creates or deletes engines of one revision
    ROLLING = "rolling"  # it replaces engines
    STOPPED = "stopped"  # a rollout is paused or halted: engines of two revisions stay
    WAITING = "waiting"  # an engine finds no node


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The part of the spec that the scaler follows."""

    least: int
    most: int
    idle_s: float
    is_raised: bool = False  # `least` is 1 instead of 0, because no gateway pod holds requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines of a service at one moment."""

    replicas: int  # spec.replicas
    num_available: int
    num_for_load: int  # engines that there should be, without unproven ones
    # Engines without requests, of a revision that a waiting or stopped rollout has not proven. They stay if `replicas`
    # becomes less.
    num_unproven: int = 0
    num_surge: int = 0  # so many of the unproven engines are kept beyond `replicas`, but none is added beyond it
    num_unschedulable: int = 0  # others that find no node; they are the first to go if `replicas` becomes less
    rollout: RolloutActivity
    load: ServiceLoad
    samples: tuple[Sample, ...]  # taken since the last change of `replicas`, the present sample included
    held: Held = NOTHING_HELD
    idle_s: float = 0.0  # seconds for which every look of this process has found the service idle
    writer: str = ""  # the field manager that set `replicas`; empty if the stored state has this number

    @property
    def has_all(self) -> bool:
        """Returns whether every engine for the load serves."""
        return self.num_available >= self.num_for_load

    @property
    def has_all_with_nodes(self) -> bool:
        """Returns the same of the engines that have a node."""
        return self.num_available + self.num_unschedulable >= self.num_for_load

    def replicas_for_more(self, number: int) -> int:
        """Returns the `replicas` that gives `number` engines for the load. `number` is larger than the present one."""
        return number + self.num_unproven

    def replicas_for_fewer(self, number: int) -> int:
        """Returns the `replicas` that gives `number` engines for the load. `number` is smaller than the present one."""
        return number + self.num_unproven - self.num_surge
