"""The state of a rollout: all that the planner knows of earlier reconciles, as plain data.

`stored` reads it from and writes it to `status.rollout`. Times are RFC 3339 strings to the second, as the status has
them, so a state that was read back equals the state that was written; an empty string is no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FailureReason: TypeAlias = Literal["AnalysisFailed", "CrashLoop", "DeadlineExceeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests that engines have counted since their start: of one engine, of a revision's, or between two times."""

    requests: int = 0  # that ended, well or not
    errors: int = 0  # of these, the ones that ended in an error of the engine's
    # Requests whose first token took no longer than so many seconds; the key +Inf counts all that had a first token.
    first_token_seconds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisWindow:
    """The time in which the first engine of the update revision is compared with the old engines."""

    start_time: str
    new: RequestCounts  # of the update revision's engines at `start_time`
    old: RequestCounts  # of all other engines at `start_time`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """Why the update revision failed. The planner rolls it out again once the spec had another revision in between."""

    revision: str
    reason: FailureReason
    message: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """The state of a service's rollouts. The planner does nothing that is not stored here first."""

    current_revision: str = ""  # the revision that has proven itself, or the first one
    update_revision: str = ""  # the spec's revision; empty before the first reconcile
    has_served: bool = False  # an engine of the current revision has served
    is_promoted: bool = False  # the first engine of the update revision has passed its analysis
    counts: Mapping[str, int] = field(default_factory=dict)  # revision -> engines that it shall have; all above 0
    # Name of an engine that is to be drained and deleted -> when its drain began; empty before that.
    terminating: Mapping[str, str] = field(default_factory=dict)
    window: AnalysisWindow | None = None  # None while no analysis runs
    failure: RolloutFailure | None = None  # None unless the update revision has failed
    # When the rollout began; empty once every engine is of the update revision, kept when that has failed.
    start_time: str = ""
    step: str = ""  # a `phases.RolloutStep`; empty before the first reconcile
    step_time: str = ""  # when the step began
    deadline_start_time: str = ""  # rollout.progressDeadlineSeconds count from here; empty while they do not count
    peak_available: int = 0  # the most engines of the update revision that were available at once
    eviction_hold_time: str = ""  # since when evictions wait for engines to move; empty while none waits
    no_capacity_time: str = ""  # since when there is no room for the engines that evictions wait for
