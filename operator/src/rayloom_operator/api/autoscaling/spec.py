"""`spec.autoscaling`: the operator sets the number of engines according to their load."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

MAX_REPLICAS = 64
_LEAST_GOAL_S = 0.05
_BOUNDS_IN_WORDS = "minReplicas is more than maxReplicas: lower it, or raise maxReplicas"
# A service without engines gets an engine only if a gateway needs the engine. So `minReplicas` 0 requires a gateway.
NO_GATEWAY_IN_WORDS = (
    "autoscaling.minReplicas 0 needs a gateway that holds requests while no engine runs: add gateway to the spec (with "
    "replicas 0 if an LLMGateway has the pods), or set minReplicas to 1 or more. To stop the service by hand, set "
    "replicas 0"
)


class Goal(Part):
    """The time to the first token for which the number of engines is chosen."""

    ttft_seconds: float = Field(
        2,
        ge=_LEAST_GOAL_S,
        le=600,
        description="Seconds within which a request should have its first token. Engines are added when the prompts "
        "that wait would take longer. A change restarts no engine.",
        # Without this rule, the API server would accept 0, because it rounds `minimum` down before it compares an
        # integer with the minimum.
        json_schema_extra=rules((f"self >= {_LEAST_GOAL_S}", f"ttftSeconds is too small; use {_LEAST_GOAL_S} or more")),
    )


class Autoscaling(Part):
    """The operator sets `replicas`, within bounds, from the waiting and running tokens of the engines."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.minReplicas <= self.maxReplicas", _BOUNDS_IN_WORDS),
        )
    )

    min_replicas: int = Field(
        1,
        ge=0,
        le=MAX_REPLICAS,
        description="Least number of engines. 0 needs spec.gateway: gateway pods of the service or of an LLMGateway "
        "hold requests until an engine serves. A "
        "change restarts no engine.",
    )
    max_replicas: int = Field(
        ge=1, le=MAX_REPLICAS, description="Greatest number of engines. A change restarts no engine."
    )
    goal: Goal = Field(
        default_factory=Goal, description="The time to the first token for which the number of engines is chosen."
    )
    idle_seconds: int = Field(
        600,
        ge=10,
        le=604800,
        description="Seconds without any request after which a service may have no engine. No effect while minReplicas "
        "is at least 1. A change restarts no engine.",
    )

    @model_validator(mode="after")
    def _bounds_hold(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError(_BOUNDS_IN_WORDS)
        return self
