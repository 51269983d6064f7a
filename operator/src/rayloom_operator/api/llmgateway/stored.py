"""The status of LLMGateway v1alpha1. The CRD's schema is generated from these classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError

from rayloom_operator.api.base import MAP_BY_NAME, Message, StatusPart
from rayloom_operator.api.gateway.stored import RouteStatus
from rayloom_operator.api.status import Condition, ReasonText

# The largest number of names that the status lists. Further names are served, but not listed.
MAX_LISTED = 512
NameState: TypeAlias = Literal["Serving", "Waiting", "Closed", "Absent"]
ReadState: TypeAlias = Literal["Current", "Outdated", "Refused", "Unknown"]
_STATE_IN_WORDS = (
    "Serving: the service is available by its own status. Waiting: it is not, and requests wait, at most "
    "spec.holdSeconds. Closed: every gateway pod refuses the requests, because it cannot read the API keys. Absent: "
    "the name is not given to the gateway pods. `status.pods` shows which pods have read the present names."
)
_READ_IN_WORDS = (
    "Current: the pod serves by the present models file. Outdated: it has not read the present one yet. Refused: it "
    "cannot use the present one, or a part of it. Unknown: the operator cannot ask the pod."
)


class ModelStatus(StatusPart):
    name: str = Field(description="The served name: clients put it into `model`.")
    service: str = Field(description="The selected LLMService.")
    state: NameState = Field(description=_STATE_IN_WORDS)
    reason: ReasonText = Field(
        description="Cause of the state, as one word: the reason of the service's condition Available, or "
        "NoGatewayPort, NameConflict, InvalidSpec, KeysMissing."
    )
    message: Message = Field("", description="Cause of the state, and the action that is needed. Empty if it serves.")


class AliasStatus(StatusPart):
    name: str = Field(description="The alias: clients put it into `model`.")
    state: NameState = Field(description=_STATE_IN_WORDS)
    reason: ReasonText = Field(
        description="Cause of the state, as one word: Serving, NameConflict, TargetMissing, KeysDiffer, KeysMissing, "
        "or the reason of a target's state."
    )
    message: Message = Field("", description="Cause of the state, and the action that is needed. Empty if all is well.")


class GatewayPodStatus(StatusPart):
    name: str = Field(description="Name of the gateway pod.")
    models: ReadState = Field(description=_READ_IN_WORDS)
    models_hash: str = Field("", description="Hash of the models file that the pod serves by. Empty if unknown.")
    message: Message = Field("", description="Cause of `models`. Empty if it is Current.")


class LLMGatewayStatus(StatusPart):
    observed_generation: int = Field(0, description="metadata.generation of the spec that the status is about.")
    conditions: tuple[Condition, ...] = Field(
        (),
        description="The conditions Accepted, Available, Degraded and Progressing. Available: a gateway pod is "
        "ready, and at least one selected service is available.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    endpoint: str = Field("", description="URL of the API inside the cluster.")
    route: RouteStatus | None = Field(None, description="The route to the gateway pods. Absent without spec.route.")
    ready: str = Field("", description="Gateway pods that take requests, of the number in spec.replicas, such as 2/2.")
    replicas: int = Field(0, description="Number of gateway pods that the spec asks for.")
    ready_replicas: int = Field(0, description="Gateway pods that take requests.")
    models_hash: str = Field("", description="Hash of the present models file, which is in the Secret of the pods.")
    pods: tuple[GatewayPodStatus, ...] = Field(
        (),
        description="The gateway pods, and whether they have read the present models file.",
        json_schema_extra=MAP_BY_NAME,
    )
    serving: str = Field("", description="Selected services that serve, of all, such as 3/4.")
    models: tuple[ModelStatus, ...] = Field(
        (),
        max_length=MAX_LISTED,
        description=f"The selected services, the oldest first; at most {MAX_LISTED}.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["service"]},
    )
    aliases: tuple[AliasStatus, ...] = Field((), description="The aliases.", json_schema_extra=MAP_BY_NAME)


def stored_status(status: Mapping[str, Any]) -> LLMGatewayStatus:
    """Returns the status in a status document; an empty status if the document cannot be read."""
    try:
        return LLMGatewayStatus.model_validate(dict(status), strict=False)
    except ValidationError:
        return LLMGatewayStatus()
