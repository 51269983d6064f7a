"""The status of an LLMService: what is true of it. The one source of the status' schema, beside `api` for the spec."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel


class Reason(StrEnum):
    """Every reason that a condition may carry. A closed list: alerts and scripts may depend on each."""

    VALID = "Valid"  # Accepted
    INVALID_SPEC = "InvalidSpec"  # Accepted, and Available while nothing of an earlier spec runs
    APPLY_REFUSED = "ApplyRefused"  # the API server refused an object of ours; Accepted
    LOADED = "Loaded"  # ModelReady
    LOADING = "Loading"  # ModelReady
    MODEL_NOT_FOUND = "ModelNotFound"  # the model's folder or file is not there
    MODEL_UNUSABLE = "ModelUnusable"  # the engine cannot serve this model with these settings
    SERVING = "Serving"
    STARTING = "Starting"
    PODS_PENDING = "PodsPending"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_FAILED = "ContainerFailed"  # a pod or container cannot be created, or one of Ray keeps ending
    ENGINE_FAILED = "EngineFailed"  # the engine ended or gave up
    ENGINE_UNREACHABLE = "EngineUnreachable"
    TOKENS_STOPPED = "TokensStopped"  # the engine says that it serves, yet no token passes through every rank
    RECOVERING = "Recovering"
    DRAINING = "Draining"


_COURSE = (Reason.LOADING, Reason.STARTING, Reason.PODS_PENDING, Reason.RECOVERING, Reason.DRAINING)
# What an admin must act on: these become Warning events. All but what is well and what passes by itself.
FAULTS = frozenset(Reason) - {Reason.VALID, Reason.LOADED, Reason.SERVING, *_COURSE}

ConditionType: TypeAlias = Literal["Accepted", "ModelReady", "Available"]
GroupState: TypeAlias = Literal["Pending", "Starting", "Serving", "Recovering", "Draining", "Failed"]


# The definition in a cluster may be older than the operator (Helm never updates it); a new reason must pass it.
ReasonText = Annotated[Reason, WithJsonSchema({"type": "string"})]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True)


class Condition(_Part):
    type: ConditionType = Field(
        description="Accepted: the spec can be used. ModelReady: every rank has loaded it. Available: a token passed "
        "through every rank a moment ago, and requests reach the engine."
    )
    status: Literal["True", "False"] = Field(description="Whether it holds.")
    reason: ReasonText = Field(description="Why, as one word of a closed list.")
    message: str = Field(description="Why, as a sentence, and what to do.")
    observed_generation: int = Field(description="metadata.generation of the spec that this was said of.")
    last_transition_time: str = Field(
        description="When `status` last changed.", json_schema_extra={"format": "date-time"}
    )


class Group(_Part):
    name: str = Field(description="Name of the RayCluster.")
    revision: str = Field(description="Hash of what rolls: spec and resolved inputs.")
    state: GroupState = Field(description="What the engine of this group does.")
    reason: ReasonText = Field(description="Why, as one word.")
    nodes: tuple[str, ...] = Field(description="Nodes that hold its ranks, in the order of the ranks.")


class Status(_Part):
    observed_generation: int = Field(0, description="metadata.generation of the spec that this status is about.")
    conditions: tuple[Condition, ...] = Field(
        (),
        description="What holds: Accepted, ModelReady, Available.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    shape: str = Field("", description="Tensor and pipeline parallelism, such as TP1xPP2.")
    ready: str = Field("", description="Engines that serve, of those asked for, such as 1/1.")
    endpoint: str = Field("", description="URL of the API inside the cluster.")
    replicas: int = Field(0, description="Engines that exist.")
    ready_replicas: int = Field(0, description="Engines that take requests.")
    available_replicas: int = Field(0, description="Engines that make tokens.")
    current_revision: str = Field("", description="Revision of the spec that is applied.")
    image: str = Field(
        "",
        description="Image of the current revision where the spec names none: the operator's default of that time.",
    )
    groups: tuple[Group, ...] = Field(
        (),
        description="The engines, each a RayCluster.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
