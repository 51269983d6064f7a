"""`spec.recovery`: times and limits for the replacement of failed ranks, processes, engines and pods."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_BACKOFF_IN_WORDS = "backoffMaxSeconds is less than backoffBaseSeconds: raise it, or lower backoffBaseSeconds"


class Recovery(Part):
    """Times and limits for replacements. An engine replaces its ranks and processes, the operator engines and pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.backoffMaxSeconds >= self.backoffBaseSeconds", _BACKOFF_IN_WORDS))
    )

    hang_seconds: int = Field(
        10,
        ge=1,
        le=3600,
        description="Seconds without a heartbeat after which the engine replaces one of its ranks or processes. The "
        "operator replaces an engine that does not answer for twice as long and is not ready. A change restarts no "
        "engine: the operator uses it at once, engines when they are next recreated.",
    )
    rebuild_seconds: int = Field(
        600,
        ge=10,
        le=86400,
        description="Seconds for which an engine may replace lost ranks, or make no progress in its start, before the "
        "operator replaces the whole engine. A change restarts no engine: the operator uses it at once, engines when "
        "they are next recreated.",
    )
    node_loss_seconds: int = Field(
        15,
        ge=1,
        le=3600,
        description="Seconds after which a node that is not ready counts as lost, and its pods are recreated on other "
        "nodes. The operator uses a change at once; the pods' tolerations have it when they are next recreated.",
    )
    restart_budget: int = Field(
        5,
        ge=0,
        le=1000,
        description="Restarts of a process within 10 minutes after which the engine ends as failed, and replacements "
        "of an engine after which there is only one each backoffMaxSeconds. A change restarts no engine: the operator "
        "uses it at once, engines when they are next recreated.",
    )
    backoff_base_seconds: int = Field(
        10,
        ge=1,
        le=86400,
        description="Seconds before an engine is replaced for the second time; each further replacement waits twice as "
        "long. The first one is immediate, also after an engine has served for 10 minutes. The operator uses a change "
        "at once.",
    )
    backoff_max_seconds: int = Field(
        300,
        ge=1,
        le=86400,
        description="Upper bound of the seconds before an engine that keeps failing is replaced. The operator uses a "
        "change at once.",
    )

    @model_validator(mode="after")
    def _backoff_grows(self) -> Recovery:
        if self.backoff_max_seconds < self.backoff_base_seconds:
            raise ValueError(_BACKOFF_IN_WORDS)
        return self
