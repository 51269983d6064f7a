"""`status.rollout`: the rollout state in the form that the API server stores and `kubectl describe` shows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

from rayloom_operator.api.base import Message
from rayloom_operator.api.rollout.state import AnalysisWindow, RequestCounts, RolloutFailure, RolloutState

# The API server replaces an atomic map as a whole, so its keys are not listed in metadata.managedFields.
_ATOMIC: dict[str, JsonValue] = {"x-kubernetes-map-type": "atomic"}
_TIME: dict[str, JsonValue] = {"format": "date-time"}


class _Stored(BaseModel):
    # Unknown fields are ignored: an operator of another version may have written the object.
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class RequestCountsStatus(_Stored):
    requests: int = Field(0, description="Requests that ended, with or without an error.")
    errors: int = Field(0, description="Requests that ended with an error of the engine.")
    first_token_seconds: dict[str, int] = Field(
        default_factory=dict,
        description="Seconds -> requests whose first token took at most this long. +Inf: all requests that got a "
        "token.",
        json_schema_extra=_ATOMIC,
    )

    @classmethod
    def of(cls, counts: RequestCounts) -> RequestCountsStatus:
        return cls(
            requests=counts.requests,
            errors=counts.errors,
            first_token_seconds=dict(counts.first_token_seconds),
        )

    def counts(self) -> RequestCounts:
        return RequestCounts(
            requests=self.requests,
            errors=self.errors,
            first_token_seconds=self.first_token_seconds,
        )


class AnalysisStatus(_Stored):
    """The comparison of the first new engine with the old engines."""

    start_time: str = Field(description="Time at which the comparison began.", json_schema_extra=_TIME)
    new_revision: RequestCountsStatus = Field(
        description="Requests that engines of the update revision had counted at startTime."
    )
    old_revisions: RequestCountsStatus = Field(description="Requests that all other engines had counted at startTime.")

    @classmethod
    def of(cls, window: AnalysisWindow) -> AnalysisStatus:
        return cls(
            start_time=window.start_time,
            new_revision=RequestCountsStatus.of(window.new),
            old_revisions=RequestCountsStatus.of(window.old),
        )

    def window(self) -> AnalysisWindow:
        return AnalysisWindow(
            start_time=self.start_time, new=self.new_revision.counts(), old=self.old_revisions.counts()
        )


class RolloutFailureStatus(_Stored):
    revision: str = Field(
        description="Revision that failed. This revision is tried again only after the spec has had another one."
    )
    reason: Literal["AnalysisFailed", "CrashLoop", "DeadlineExceeded"] = Field(
        description="Reason of the failure, as one word."
    )
    message: Message = Field(description="Reason of the failure, as a sentence.")
    time: str = Field(description="Time of the failure.", json_schema_extra=_TIME)

    @classmethod
    def of(cls, failure: RolloutFailure) -> RolloutFailureStatus:
        return cls(revision=failure.revision, reason=failure.reason, message=failure.message, time=failure.time)

    def failure(self) -> RolloutFailure:
        return RolloutFailure(revision=self.revision, reason=self.reason, message=self.message, time=self.time)


def _former(name: str, extra: dict[str, JsonValue] | None = None) -> Any:
    description = f"Former name of {name}; read, and no longer written."
    return Field(None, exclude=True, description=description, json_schema_extra=extra)


class _FormerCounts(_Stored):
    requests: int | None = Field(None, description="Requests, as in analysis.newRevision.")
    errors: int | None = Field(None, description="Errors, as in analysis.newRevision.")
    ttft: dict[str, int] | None = _former("firstTokenSeconds", _ATOMIC)


class _FormerWindow(_Stored):
    time: str | None = _former("startTime")
    new: _FormerCounts | None = _former("newRevision")
    old: _FormerCounts | None = _former("oldRevisions")


# Former name of a field of `status.rollout` -> its current name.
_RENAMED = {
    "hasServed": "currentRevisionServed",
    "isPromoted": "analysisPassed",
    "counts": "enginesPerRevision",
    "leaving": "terminatingEngines",
    "rollTime": "startTime",
    "stepTime": "stepStartTime",
    "progressTime": "progressDeadlineStartTime",
    "mostWell": "peakAvailableEngines",
    "heldTime": "evictionHoldStartTime",
    "shortTime": "noCapacityStartTime",
}


class _FormerNames(_Stored):
    """Fields with the names that the previous release used. These fields are needed to read statuses that the previous
    release stored.

    The schema must have these fields: the API server drops fields that the schema lacks, even from stored objects. The
    schema gives them no default, because the API server would write a default into every object.
    """

    has_served: bool | None = _former("currentRevisionServed")
    is_promoted: bool | None = _former("analysisPassed")
    counts: dict[str, int] | None = _former("enginesPerRevision", _ATOMIC)
    leaving: dict[str, str] | None = _former("terminatingEngines", _ATOMIC)
    window: _FormerWindow | None = _former("analysis")
    roll_time: str | None = _former("startTime")
    step_time: str | None = _former("stepStartTime")
    progress_time: str | None = _former("progressDeadlineStartTime")
    most_well: int | None = _former("peakAvailableEngines")
    held_time: str | None = _former("evictionHoldStartTime")
    short_time: str | None = _former("noCapacityStartTime")

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = dict(given)
        for former, name in _RENAMED.items():
            # If both names have a value, the operator was downgraded to the previous release in the meantime. That
            # release wrote the former name, so the former name has the newer value.
            if (value := found.pop(former, None)) is not None:
                found[name] = value
        if isinstance(window := found.pop("window", None), dict):
            found["analysis"] = {
                "startTime": window.get("time"),
                "newRevision": _renamed_counts(window.get("new")),
                "oldRevisions": _renamed_counts(window.get("old")),
            }
        return found


def _renamed_counts(former: Any) -> Any:
    """Returns the map `former` with the current names of its keys. If `former` is not a map, returns `former`
    unchanged, and pydantic refuses it."""
    if not isinstance(former, dict):
        return former
    renamed = {"ttft": "firstTokenSeconds"}
    return {renamed.get(name, name): value for name, value in former.items()}


class RolloutStatus(_FormerNames):
    """The rollout state. The operator writes each decision here before it acts on the decision.

    A field without a value is absent.
    """

    current_revision: str = Field(
        "",
        description="Revision whose rollout succeeded last; before any rollout, the first revision.",
    )
    update_revision: str = Field("", description="Revision of the spec.")
    step: str = Field("", description="Step of the rollout, as one word.")
    step_start_time: str | None = Field(None, description="Time at which the step began.")
    start_time: str | None = Field(
        None,
        description="Time at which the rollout began. Absent once every engine is of the update revision; kept if that "
        "revision failed.",
    )
    current_revision_served: bool | None = Field(
        None, description="True once an engine of the current revision has served."
    )
    engines_per_revision: dict[str, int] | None = Field(
        None, description="Revision -> number of engines that the revision should have.", json_schema_extra=_ATOMIC
    )
    terminating_engines: dict[str, str] | None = Field(
        None,
        description="Name of a terminating engine -> time at which its drain began; an empty text before that time.",
        json_schema_extra=_ATOMIC,
    )
    analysis: AnalysisStatus | None = Field(
        None, description="The comparison of the first new engine with the old ones; absent while there is none."
    )
    analysis_passed: bool | None = Field(
        None, description="True once the first engine of the update revision has passed its analysis."
    )
    failure: RolloutFailureStatus | None = Field(
        None, description="Failure of the update revision; absent while it has not failed."
    )
    progress_deadline_start_time: str | None = Field(
        None, description="Time from which rollout.progressDeadlineSeconds count; absent while they do not count."
    )
    peak_available_engines: int | None = Field(
        None, description="Most engines of the update revision that served at once."
    )
    eviction_hold_start_time: str | None = Field(
        None,
        description="Time since which evictions wait until engines have moved to other nodes; absent while no eviction "
        "waits.",
    )
    no_capacity_start_time: str | None = Field(
        None,
        description="Time since which no node has had room for an engine that must move to another node; absent while "
        "there is room.",
    )
    retired_revisions: list[str] | None = Field(
        None,
        description="Revisions that no engine needs any more. Their stored specs are deleted next; then the field is "
        "absent.",
    )

    @classmethod
    def of(cls, state: RolloutState) -> RolloutStatus:
        """Converts the state to the status. `state()` of the result returns an equal state."""
        return cls(
            current_revision=state.current_revision,
            update_revision=state.update_revision,
            step=state.step,
            step_start_time=state.step_time or None,
            start_time=state.start_time or None,
            current_revision_served=state.has_served or None,
            engines_per_revision=dict(state.counts) or None,
            terminating_engines=dict(state.terminating) or None,
            analysis=AnalysisStatus.of(state.window) if state.window is not None else None,
            analysis_passed=state.is_promoted or None,
            failure=RolloutFailureStatus.of(state.failure) if state.failure is not None else None,
            progress_deadline_start_time=state.deadline_start_time or None,
            peak_available_engines=state.peak_available or None,
            eviction_hold_start_time=state.eviction_hold_time or None,
            no_capacity_start_time=state.no_capacity_time or None,
            retired_revisions=list(state.retired) or None,
        )

    def state(self) -> RolloutState:
        """Converts the status back to the state."""
        return RolloutState(
            current_revision=self.current_revision,
            update_revision=self.update_revision,
            has_served=bool(self.current_revision_served),
            is_promoted=bool(self.analysis_passed),
            counts=self.engines_per_revision or {},
            terminating=self.terminating_engines or {},
            window=self.analysis.window() if self.analysis is not None else None,
            failure=self.failure.failure() if self.failure is not None else None,
            start_time=self.start_time or "",
            step=self.step,
            step_time=self.step_start_time or "",
            deadline_start_time=self.progress_deadline_start_time or "",
            peak_available=self.peak_available_engines or 0,
            eviction_hold_time=self.eviction_hold_start_time or "",
            no_capacity_time=self.no_capacity_start_time or "",
            retired=tuple(self.retired_revisions or ()),
        )
