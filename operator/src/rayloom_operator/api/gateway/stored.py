"""`status.gateway`: the gateway pods in the form that the API server stores."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rayloom_operator.api.base import Message

_MOST = 1 << 31
NO_PORT = "NoPort"  # reason: engines exist, but none that serves has the port for gateways


class RouteStatus(BaseModel):
    """The HTTPRoute or Ingress that leads to the gateway pods."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    kind: str = Field("", max_length=16, description="HTTPRoute or Ingress.")
    url: str = Field(
        "",
        max_length=2048,
        description="URL of the API outside of the cluster. For an HTTPRoute, the operator does not know whether the "
        "listener has TLS: it shows https unless every parentRef names port 80.",
    )
    accepted: bool = Field(
        False,
        description="For an HTTPRoute, whether every Gateway has accepted it and found the Service. For an Ingress, "
        "whether a controller has written an address into it.",
    )
    reason: str = Field(
        "",
        max_length=64,
        description="Cause of `accepted`, as one word: Accepted, Pending, RouteNotAccepted, RouteRefused, NotAllowed, "
        "or GatewayApiMissing.",
    )
    message: Message = Field(
        "", description="Cause of `accepted`, with the controller's own message if it refuses the route."
    )


class GatewayStatus(BaseModel):
    """The gateway pods. Objects of the gateway may exist as long as the status has this part."""

    # Unknown fields are ignored: an operator of another version may have written the object.
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    replicas: int = Field(0, ge=0, le=_MOST, description="Number of gateway pods that the spec asks for.")
    ready: int = Field(0, ge=0, le=_MOST, description="Gateway pods that are ready, so that they take requests.")
    reason: str = Field(
        "",
        max_length=64,
        description="Cause of `ready`, as one word: Ready, Starting, Updating, ProgressDeadlineExceeded, Off, "
        "NoPort, or the reason of a pod's fault.",
    )
    message: Message = Field("", description="Cause of `ready`, and the action that is needed, as sentences.")
    route: RouteStatus | None = Field(None, description="The route to the pods. Absent without spec.gateway.route.")
