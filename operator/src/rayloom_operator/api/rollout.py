"""spec.rollout: how a change replaces the engines that run; and what a status remembers of that."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

from rayloom_operator.api.base import Message, Part, rules

_STUCK_IN_WORDS = "maxSurge and maxUnavailable are both 0, so nothing could ever be replaced: raise one of them"


class Analysis(Part):
    """When the first engine of a new revision is good enough for the others to follow."""

    hold_seconds: int = Field(
        60,
        ge=0,
        le=86400,
        description="Seconds for which the first new engine takes its share of the requests before others follow. A "
        "change restarts none.",
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=100_000,
        description="Requests of each revision within these seconds that make its figures count. Where only the new "
        "one had fewer, it is compared for up to 3 times as long. With fewer then its own probes decide: a token "
        "through every rank each 10 s. A change restarts none.",
    )
    max_error_percent: int = Field(
        1,
        ge=0,
        le=100,
        description="Percent of the new engine's requests that may fail, above the percent that fails in the old ones. "
        "A change restarts none.",
    )
    max_ttft_ratio: float = Field(
        2,
        ge=1,
        le=1000,
        description="How many times as long as in the old engines the new one's first token may take, each the time "
        "that 99 percent of requests keep to. A change restarts none.",
    )


class Rollout(Part):
    """How a change replaces the engines that run."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.maxSurge > 0 || self.maxUnavailable > 0", _STUCK_IN_WORDS))
    )

    max_surge: int = Field(
        1, ge=0, le=64, description="Engines above `replicas` that may exist meanwhile. A change restarts none."
    )
    max_unavailable: int = Field(
        0,
        ge=0,
        le=64,
        description="Engines below `replicas` that may serve meanwhile. 1 with maxSurge 0 rolls where there is room "
        "for no more engines. A change restarts none.",
    )
    analysis: Analysis = Field(default_factory=Analysis, description="What the first new engine has to show.")
    progress_deadline_seconds: int = Field(
        1800,
        ge=1,
        le=604800,
        description="Seconds without progress after which a roll has failed. Those in which nodes have no room, or "
        "the roll is paused, do not count. A change restarts none.",
    )
    auto_rollback: bool = Field(
        True,
        description="Whether the old revision comes back by itself when the new one fails. Otherwise the roll stops "
        "where it is, and a first engine that failed gets no requests. A change restarts none.",
    )
    paused: bool = Field(
        False,
        description="Stops the roll where it is until false; the new revision is not judged either. Engines that fail "
        "are still made anew, a change of `replicas` counts, and the way back to the old revision is open.",
    )

    @model_validator(mode="after")
    def _something_may_move(self) -> Rollout:
        if self.max_surge == self.max_unavailable == 0:
            raise ValueError(_STUCK_IN_WORDS)
        return self


# One value: whoever writes it owns all of it, and metadata.managedFields names no key.
_ATOMIC: dict[str, JsonValue] = {"x-kubernetes-map-type": "atomic"}


class _Stored(BaseModel):
    # Read back from clusters, where an operator of another version may have written it.
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Figures(_Stored):
    """What engines count since they started. Sums over those of a revision, or what is between two moments."""

    requests: int = Field(0, description="Requests that ended, well or not.")
    errors: int = Field(0, description="Those of them that ended in an error of the engine's.")
    ttft: dict[str, int] = Field(
        default_factory=dict,
        description="Requests whose first token took no longer than so many seconds, +Inf for all that had one.",
        json_schema_extra=_ATOMIC,
    )


class Window(_Stored):
    """The time in which the first new engine is compared with the old ones."""

    time: str = Field(description="When it began.", json_schema_extra={"format": "date-time"})
    new: Figures = Field(description="What the new engines had counted then.")
    old: Figures = Field(description="What the old engines had counted then.")


class RolloutFailure(_Stored):
    revision: str = Field(description="Revision that failed. It is tried again once the spec had another in between.")
    reason: Literal["AnalysisFailed", "CrashLoop", "DeadlineExceeded"] = Field(description="Why, as one word.")
    message: Message = Field(description="Why, as a sentence.")
    time: str = Field(description="When it failed.", json_schema_extra={"format": "date-time"})


class RolloutState(_Stored):
    """All that is remembered of a roll. Nothing is done that is not written here first."""

    current_revision: str = Field("", description="Revision that has proven itself; empty before the first.")
    update_revision: str = Field("", description="Revision of the spec.")
    has_served: bool = Field(False, description="Whether an engine of the current revision ever served.")
    is_promoted: bool = Field(False, description="Whether the first engine of the update has passed its analysis.")
    counts: dict[str, int] = Field(
        default_factory=dict,
        description="Engines of each revision that are to be there.",
        json_schema_extra=_ATOMIC,
    )
    leaving: dict[str, str] = Field(
        default_factory=dict,
        description="Engines that are to go, and when their drain began; empty before it did.",
        json_schema_extra=_ATOMIC,
    )
    window: Window | None = Field(None, description="The analysis that runs; absent while there is none.")
    failure: RolloutFailure | None = Field(None, description="Why the update is not rolled out; absent otherwise.")
    roll_time: str = Field(
        "", description="When the roll to the update began; empty once every engine is of it, kept when it has failed."
    )
    step: str = Field("", description="What the roll does, as one word.")
    step_time: str = Field("", description="When that began.")
    progress_time: str = Field("", description="Since when the deadline counts; empty while it does not.")
    most_well: int = Field(0, description="Most engines of the update that served at once.")
    held_time: str = Field("", description="Since when evictions wait for engines that move; empty while none does.")
    short_time: str = Field("", description="Since when there is no room for what evictions wait for; empty otherwise.")
