"""The state of a service's scaler: everything that the scaler knows from earlier reconciles, as plain data.

The module `stored` converts the state to and from `status.autoscaling`. Times are RFC 3339 strings to the second. An
empty string means no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ScalingReason(StrEnum):
    """The reasons that the scaler gives for the number of engines."""

    STEADY = "Steady"  # the load needs no other number of engines, or no window is full yet
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    SCALING_TO_ZERO = "ScalingToZero"  # replicas becomes 0 with the next write; this reason is stored before that write
    SCALED_TO_ZERO = "ScaledToZero"
    WOKEN = "Woken"  # the first engine was created: a gateway held a request, or had no tokenizer
    BOUNDED = "Bounded"  # replicas was below minReplicas or above maxReplicas
    AT_MAXIMUM = "AtMaximum"  # the load needs more engines than maxReplicas
    FIGURES_MISSING = "FiguresMissing"  # an engine does not report its load, so no engine is removed
    ROLLING_OUT = "RollingOut"  # engines are being replaced
    WAITING_FOR_CAPACITY = "WaitingForCapacity"  # an engine is unschedulable: no node has room for one of its pods
    OTHER_WRITER = "OtherWriter"  # another client set replicas last
    SUSPENDED = "Suspended"  # replicas is 0, and the scaler did not set it


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingInputs:
    """Sums over all engines, from which the scaler computes the number of engines."""

    engines: int = 0  # engines that reported their load
    queued_tokens: int = 0
    running_tokens: int = 0
    held_tokens: int = 0  # tokens of requests that a gateway holds
    held_requests: int = 0
    tokens_per_second: int = 0  # prompt tokens per second; the earlier rate of an engine while none is measured
    needed_engines: str = "0"  # needed engines with two decimals; a text, because the status has no fractions


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    desired: int = 0
    writer: str = ""  # field manager that last set replicas; empty before the scaler sees a first change
    reason: str = ""  # a ScalingReason; empty before the first reconcile
    message: str = ""
    inputs: ScalingInputs = field(default_factory=ScalingInputs)
    last_scale_time: str = ""  # time of the last change of replicas
    starting_since: str = ""  # time at which engines were last added; empty once all engines serve
    start_seconds: int = 0  # time from the last addition of engines until all engines served; 0: not measured yet
    idle_since: str = ""  # time since which no engine has had a request
