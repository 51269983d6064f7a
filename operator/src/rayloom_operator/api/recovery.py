"""spec.recovery: when what is broken is replaced."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

_BACKOFF_IN_WORDS = "backoffMaxSeconds is less than backoffBaseSeconds: raise it, or lower backoffBaseSeconds"


class Recovery(Part):
    """When what is broken is replaced. The engine replaces its ranks, the operator whole engines."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.backoffMaxSeconds >= self.backoffBaseSeconds", _BACKOFF_IN_WORDS))
    )

    hang_seconds: int = Field(
        10,
        ge=1,
        le=3600,
        description="Seconds without a sign of life after which the engine replaces a rank or process of its own. An "
        "engine that is silent for twice as long, and not ready, is replaced whole. A change restarts none: the "
        "operator goes by it at once, engines once they are made anew.",
    )
    rebuild_seconds: int = Field(
        600,
        ge=10,
        le=86400,
        description="Seconds that an engine may take to replace lost ranks, or may stand still in its start, before it "
        "is replaced whole. A change restarts none: the operator goes by it at once, engines once they are made anew.",
    )
    node_loss_seconds: int = Field(
        15,
        ge=1,
        le=3600,
        description="Seconds after which a node that is not ready is given up, and the pods on it are made elsewhere. "
        "A change has its effect at once; in the pods' tolerations once they are made anew.",
    )
    restart_budget: int = Field(
        5,
        ge=0,
        le=1000,
        description="Restarts of a process within 10 minutes before the engine gives up, and replacements of an engine "
        "before there is only one each backoffMaxSeconds. A change restarts none: the operator goes by it at once, "
        "engines once they are made anew.",
    )
    backoff_base_seconds: int = Field(
        10,
        ge=1,
        le=86400,
        description="Seconds before an engine is replaced for the second time; each further time takes twice as long. "
        "The first time is at once, and so is that after 10 minutes of service. A change has its effect at "
        "once.",
    )
    backoff_max_seconds: int = Field(
        300,
        ge=1,
        le=86400,
        description="Most seconds that an engine that keeps failing waits for its replacement. A change has its effect "
        "at once.",
    )

    @model_validator(mode="after")
    def _backoff_grows(self) -> Recovery:
        if self.backoff_max_seconds < self.backoff_base_seconds:
            raise ValueError(_BACKOFF_IN_WORDS)
        return self
