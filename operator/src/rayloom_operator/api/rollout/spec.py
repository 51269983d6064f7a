"""`spec.rollout`: settings of the replacement of engines after a change of the spec."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_NOTHING_MAY_MOVE = "maxSurge and maxUnavailable are both 0, so nothing could ever be replaced: raise one of them"


class Analysis(Part):
    """Settings of the comparison of a new revision's first engine with the old engines."""

    hold_seconds: int = Field(
        60,
        ge=0,
        le=86400,
        description="Seconds for which the first new engine takes its share of the requests before others follow. A "
        "change restarts no engine.",
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=100_000,
        description="Requests that each revision needs within these seconds to be compared. Where only the new "
        "revision has fewer, the comparison lasts for up to 3 times as long. If it then still has fewer, only the "
        "engine's own probes count: a token through every rank each 10 s. A change restarts no engine.",
    )
    max_error_percent: int = Field(
        1,
        ge=0,
        le=100,
        description="Percent of the new engine's requests that may fail, above the percent that fails in the old ones. "
        "A change restarts no engine.",
    )
    max_ttft_ratio: float = Field(
        2,
        ge=1,
        le=1000,
        description="Factor by which the first token may take longer in the new engine than in the old ones, each by "
        "its 99th percentile. A change restarts no engine.",
    )


class Rollout(Part):
    """Settings of the replacement of engines after a change of the spec."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.maxSurge > 0 || self.maxUnavailable > 0", _NOTHING_MAY_MOVE))
    )

    max_surge: int = Field(
        1,
        ge=0,
        le=64,
        description="Engines above `replicas` that may exist during a rollout. A change restarts no engine.",
    )
    max_unavailable: int = Field(
        0,
        ge=0,
        le=64,
        description="Engines below `replicas` that may serve during a rollout. 1 with maxSurge 0 is for clusters "
        "without room for more engines. A change restarts no engine.",
    )
    analysis: Analysis = Field(
        default_factory=Analysis, description="Comparison of the first new engine with the old ones."
    )
    progress_deadline_seconds: int = Field(
        1800,
        ge=1,
        le=604800,
        description="Seconds without progress after which a rollout has failed. Seconds in which nodes have no room, "
        "or the rollout is paused, do not count. A change restarts no engine.",
    )
    auto_rollback: bool = Field(
        True,
        description="With true, the operator rolls back to the old revision when the new one fails. With false, the "
        "rollout then stops at its step, and a first engine that failed gets no requests. A change restarts no engine.",
    )
    paused: bool = Field(
        False,
        description="Stops the rollout where it is until false; the new revision is not judged either. Engines that "
        "fail are still recreated, a change of `replicas` counts, and the way back to the old revision is open.",
    )

    @model_validator(mode="after")
    def _something_may_move(self) -> Rollout:
        if self.max_surge == self.max_unavailable == 0:
            raise ValueError(_NOTHING_MAY_MOVE)
        return self
