"""The scaler's input: the settings of the spec, and the engines at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rayloom_operator.decide.scaling.load import NOTHING_HELD, Held, ServiceLoad
from rayloom_operator.decide.scaling.windows import Sample

SCALER = "rayloom-operator-scaler"  # field manager of the scaler's writes


class RolloutActivity(Enum):
    """The activity of the rollout planner. The scaler adds engines only in SETTLED."""

    SETTLED = "settled"  # nothing, or it creates or deletes engines of one revision
    ROLLING = "rolling"  # engines of two revisions exist; it replaces them, or is paused or halted
    WAITING = "waiting"  # the rollout waits for a node with room


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The part of the spec that the scaler follows."""

    least: int
    most: int
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines of a service at one moment."""

    replicas: int  # spec.replicas
    num_available: int
    rollout: RolloutActivity
    load: ServiceLoad
    samples: tuple[Sample, ...]  # taken since the last change of `replicas`, the present sample included
    held: Held = NOTHING_HELD
    writer: str = ""  # the field manager that set `replicas`; empty if the stored state has this number

    @property
    def has_all(self) -> bool:
        return self.num_available >= self.replicas
