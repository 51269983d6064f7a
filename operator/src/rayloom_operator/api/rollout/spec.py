"""`spec.rollout`: settings for the replacement of engines after the spec has changed."""

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
        description="Seconds for which the first new engine takes its share of the requests before further engines are "
        "replaced. A change restarts no engine.",
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=100_000,
        description="Least number of requests that each revision needs, so that the times to the first token can be "
        "compared. If only the new revision has fewer within holdSeconds, the analysis lasts for up to 3 times "
        "holdSeconds. If the requests are still too few, the times are not compared: the new revision passes if its "
        "engine serves, unless maxErrorPercent is exceeded. A change restarts no engine.",
    )
    max_error_percent: int = Field(
        1,
        ge=0,
        le=100,
        description="Percent of the new revision's requests that may fail, in addition to the percent that fails in "
        "the old one. A change restarts no engine.",
    )
    max_ttft_ratio: float = Field(
        2,
        ge=1,
        le=1000,
        description="Limit of the new revision's time to the first token (99th percentile), as a multiple of the old "
        "revision's. A change restarts no engine.",
    )


class Rollout(Part):
    """Settings for the replacement of engines after the spec has changed."""

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
        description="Number of engines, out of `replicas`, that may be absent or not serving during a rollout. For a "
        "cluster without room for more engines, set maxUnavailable 1 and maxSurge 0. A change restarts no engine.",
    )
    analysis: Analysis = Field(
        default_factory=Analysis, description="Comparison of the first new engine with the old ones."
    )
    progress_deadline_seconds: int = Field(
        1800,
        ge=1,
        le=604800,
        description="Seconds without progress after which a rollout has failed. The time in which no node has room, or "
        "in which the rollout is paused, does not count. A change restarts no engine.",
    )
    auto_rollback: bool = Field(
        True,
        description="true: if the new revision fails, the operator rolls back to the old one. false: if the new "
        "revision fails, the rollout stops at its step; if the analysis was not passed yet, the new engine gets no "
        "requests while the old ones suffice. A change restarts no engine.",
    )
    paused: bool = Field(
        False,
        description="true: the rollout stops at its step, and the new revision is not judged, until the value is false "
        "again. Engines that fail are still recreated, a change of `replicas` is still applied, and a return to the "
        "old revision is still carried out.",
    )

    @model_validator(mode="after")
    def _something_may_move(self) -> Rollout:
        if self.max_surge == self.max_unavailable == 0:
            raise ValueError(_NOTHING_MAY_MOVE)
        return self
