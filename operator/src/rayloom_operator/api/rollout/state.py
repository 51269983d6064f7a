"""The state of a rollout: everything that the planner knows from earlier reconciles, as plain data.

The module `stored` converts the state to and from `status.rollout`. Times are RFC 3339 strings to the second, as in the
status. So a state that is read back equals the state that was written. An empty string means no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FailureReason: TypeAlias = Literal["AnalysisFailed", "CrashLoop", "DeadlineExceeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """The request counts of one engine or of several engines together, or the difference of two such counts."""

    requests: int = 0  # requests that ended, with or without an error
    errors: int = 0  # number of the `requests` that ended with an error of the engine
    # A Prometheus histogram: seconds -> requests whose first token took at most this long. +Inf: all requests that got
    # a token.
    first_token_seconds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisWindow:
    """A running analysis of the update revision's first engine: its start, and the request counts at that time."""

    start_time: str
    new: RequestCounts  # counts of the update revision's engines at `start_time`
    old: RequestCounts  # counts of all other engines at `start_time`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """The failure of the update revision. The revision is tried again only after the spec has had another revision."""

    revision: str
    reason: FailureReason
    message: str
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """The state of a service's rollouts. Each decision of the planner is stored here before it is carried out."""

    current_revision: str = ""  # the last revision whose rollout succeeded, or the first revision
    update_revision: str = ""  # the spec's revision; empty before the first reconcile
    has_served: bool = False  # an engine of the current revision has served
    is_promoted: bool = False  # the first engine of the update revision has passed its analysis
    # revision -> wanted number of engines; revisions with 0 are left out
    counts: Mapping[str, int] = field(default_factory=dict)
    # Name of an engine that is to be drained and deleted -> time at which its drain began; empty before the drain.
    terminating: Mapping[str, str] = field(default_factory=dict)
    window: AnalysisWindow | None = None  # None while no analysis runs
    failure: RolloutFailure | None = None  # None unless the update revision has failed
    # Time at which the rollout began. Empty once every engine is of the update revision. A failed rollout keeps its
    # start time.
    start_time: str = ""
    step: str = ""  # a `phases.RolloutStep`; empty before the first reconcile
    step_time: str = ""  # time at which the step began
    deadline_start_time: str = ""  # time from which rollout.progressDeadlineSeconds count; empty: no deadline runs
    peak_available: int = 0  # largest number of engines of the update revision that were available at once
    # time since which evictions wait for the next engine to move; empty: no wait
    eviction_hold_time: str = ""
    # time since which no node has room for the engines that must move; empty: a node has room
    no_capacity_time: str = ""
    # Revisions that the state before this one needed and this state does not need. Their stored specs are deleted only
    # once this state is in the status: the state before may need them for a rollback.
    retired: tuple[str, ...] = ()

    @property
    def revisions(self) -> frozenset[str]:
        """The revisions whose specs may be needed to create engines."""
        return frozenset({self.current_revision, self.update_revision, *self.counts} - {""})
