"""`spec.recovery`: times and limits for the replacement of failed ranks, processes, engines and pods."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_BACKOFF_IN_WORDS = "backoffMaxSeconds is less than backoffBaseSeconds: raise it, or lower backoffBaseSeconds"


class Recovery(Part):
    """Times and limits for replacements. An engine replaces its ranks and processes.

    The operator replaces engines, and pods on lost nodes.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(("self.backoffMaxSeconds >= self.backoffBaseSeconds", _BACKOFF_IN_WORDS))
    )

    hang_seconds: int = Field(
        10,
        ge=1,
        le=3600,
        description="Seconds without a heartbeat after which the engine replaces one of its ranks or processes. The "
        "operator replaces an engine that is not ready, and has not answered for at least twice this time. A change "
        "restarts no engine: the operator uses the new value at once, an engine once it is recreated.",
    )
    rebuild_seconds: int = Field(
        600,
        ge=10,
        le=86400,
        description="Seconds for which an engine may replace lost ranks, or make no progress in its start, before the "
        "operator replaces the whole engine. A change restarts no engine: the operator uses the new value at once, an "
        "engine once it is recreated.",
    )
    node_loss_seconds: int = Field(
        15,
        ge=1,
        le=3600,
        description="Seconds after which a node that is not ready counts as lost, and its pods are recreated on other "
        "nodes. The operator uses a new value at once; pods get it, as a toleration, once they are recreated.",
    )
    restart_budget: int = Field(
        5,
        ge=0,
        le=1000,
        description="Largest number of restarts of a process within 10 minutes; with one more, the engine exits as "
        "failed. Also the number of replacements of an engine after which the operator replaces this engine at most "
        "once in backoffMaxSeconds. A change restarts no engine: the operator uses the new value at once, an engine "
        "once it is recreated.",
    )
    backoff_base_seconds: int = Field(
        10,
        ge=1,
        le=86400,
        description="The first replacement of an engine that fails is immediate, the second waits for this many "
        "seconds, and each further one waits twice as long. Once an engine has served for 10 minutes, its replacements "
        "are counted from the first again. The operator uses a new value at once.",
    )
    backoff_max_seconds: int = Field(
        300,
        ge=1,
        le=86400,
        description="Upper bound of the seconds before an engine that keeps failing is replaced. The operator uses a "
        "new value at once.",
    )

    @model_validator(mode="after")
    def _backoff_grows(self) -> Recovery:
        if self.backoff_max_seconds < self.backoff_base_seconds:
            raise ValueError(_BACKOFF_IN_WORDS)
        return self
