"""The status of an LLMService: what is true of it. The one source of the status' schema, beside `api` for the spec."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel

from rayloom_operator.api.base import Message
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.rollout import RolloutState


class Reason(StrEnum):
    """Every reason that a condition may carry. A closed list: alerts and scripts may depend on each."""

    VALID = "Valid"  # Accepted
    INVALID_SPEC = "InvalidSpec"  # Accepted, and Available while nothing of an earlier spec runs
    DOES_NOT_FIT = "DoesNotFit"  # the model does not fit what it may use; where InvalidSpec is
    NOT_ALLOWED = "NotAllowed"  # the operator's settings do not allow what the spec asks for; where InvalidSpec is
    APPLY_REFUSED = "ApplyRefused"  # the API server refused an object of ours; Accepted
    UNSUPPORTED_KUBERAY = "UnsupportedKubeRay"  # the cluster has no KubeRay, or one that is too old; Accepted
    LOADED = "Loaded"  # ModelReady
    LOADING = "Loading"  # ModelReady
    INSPECTING = "Inspecting"  # a Job inspects the model, before anything is made for it
    MODEL_NOT_FOUND = "ModelNotFound"  # the model's folder or file is not there, or its name or revision on the hub
    MODEL_NO_ACCESS = "ModelNoAccess"  # the hub wants a token, or another one
    MODEL_GATED = "ModelGated"  # the token's account has not accepted the model's terms
    MODEL_UNSUPPORTED = "ModelUnsupported"  # the engine has no such architecture, or not this kind of weights
    HUB_UNREACHABLE = "HubUnreachable"  # the hub does not answer; tried again ever more slowly
    INSPECTION_FAILED = "InspectionFailed"  # the Job ended without a word about the model; tried again
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
    HEAD_LOST = "HeadLost"  # the head pod is gone; a new RayCluster takes the place of the old one
    ENGINE_STUCK = "EngineStuck"  # neither serves nor gets on, for longer than recovery.rebuildSeconds
    NODE_LOST = "NodeLost"  # a node with pods of the service is not ready; Degraded
    GROUP_BACK_OFF = "GroupBackOff"  # an engine keeps failing, and waits before it is made anew
    SCHEDULED = "Scheduled"  # Scheduled
    HEALTHY = "Healthy"  # Degraded is False
    SUSPENDED = "Suspended"  # spec.replicas is 0; Available, Scheduled and ModelReady
    # Progressing: the words of `rollout_words.RolloutStep`. Starting is above.
    COMPLETE = "Complete"
    SCALING = "Scaling"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    ANALYZING = "Analyzing"
    PROMOTING = "Promoting"
    MOVING = "Moving"
    REPLACING = "Replacing"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"  # Paused as well
    HALTED = "Halted"
    ANALYSIS_FAILED = "AnalysisFailed"  # RolledBack: why a revision is not tried again
    CRASH_LOOP = "CrashLoop"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NOT_ROLLED_BACK = "NotRolledBack"  # RolledBack is False
    NOT_PAUSED = "NotPaused"  # Paused is False


_COURSE = (Reason.LOADING, Reason.INSPECTING, Reason.STARTING, Reason.PODS_PENDING, Reason.RECOVERING, Reason.DRAINING)
# Steps of a roll that need nobody.
STEPS = frozenset(
    {
        *(Reason.COMPLETE, Reason.SCALING, Reason.ANALYZING, Reason.PROMOTING, Reason.MOVING, Reason.REPLACING),
        *(Reason.STARTING, Reason.PAUSED),
    }
)
# What an admin must act on: these become Warning events. All but what is well and what passes by itself.
FAULTS = frozenset(Reason) - {
    *(Reason.VALID, Reason.LOADED, Reason.SERVING, Reason.SCHEDULED, Reason.HEALTHY, Reason.SUSPENDED),
    *(Reason.NOT_ROLLED_BACK, Reason.NOT_PAUSED),
    *_COURSE,
    *STEPS,
}

ConditionType: TypeAlias = Literal[
    "Accepted", "ModelReady", "Scheduled", "Available", "Degraded", "Progressing", "RolledBack", "Paused"
]
GroupState: TypeAlias = Literal["Pending", "Starting", "Serving", "Recovering", "Draining", "BackOff", "Failed"]


_REASONS = frozenset(Reason)

# The definition in a cluster may be older than the operator (Helm never updates it); a new reason must pass it. Read
# back, a word of a newer operator stands for the nearest: it is to cost no engine its record.
ReasonText = Annotated[
    Reason,
    BeforeValidator(lambda reason: reason if reason in _REASONS else Reason.ENGINE_FAILED),
    WithJsonSchema({"type": "string"}),
]
StoredState = Annotated[GroupState, BeforeValidator(lambda state: state if state in get_args(GroupState) else "Failed")]


_MAX_NODES = 4096
NodeName = Annotated[str, Field(max_length=253)]


def _first_nodes(names: object) -> object:
    return tuple(names[:_MAX_NODES]) if isinstance(names, list | tuple) else names


class _Part(BaseModel):
    # Read back from clusters, where an operator of another version may have written it.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, alias_generator=to_camel, populate_by_name=True)


class Condition(_Part):
    type: ConditionType = Field(
        description="Accepted: the spec can be used. ModelReady: every rank of an engine has loaded it. Scheduled: "
        "every pod has a node. Available: a token passed through every rank of an engine a moment ago, and requests "
        "reach it. Degraded: something is broken, though others may serve meanwhile. Progressing: engines are made, "
        "replaced or taken away. RolledBack: the spec's revision failed, and the one before it runs. Paused: a roll "
        "stands still because spec.rollout.paused says so."
    )
    status: Literal["True", "False"] = Field(description="Whether it holds.")
    reason: ReasonText = Field(description="Why, as one word of a closed list.")
    message: Message = Field(description="Why, as a sentence, and what to do.")
    observed_generation: int = Field(description="metadata.generation of the spec that this was said of.")
    last_transition_time: str = Field(
        description="When `status` last changed.", json_schema_extra={"format": "date-time"}
    )


class Failure(_Part):
    uid: str = Field(description="uid of the RayCluster that failed last; empty once it served after all.")
    reason: ReasonText = Field(description="Why the first one failed since the engine last served well.")
    message: Message = Field(description="That as a sentence, with the last lines of a container that ended.")
    time: str = Field(description="When the last one failed.", json_schema_extra={"format": "date-time"})


class Group(_Part):
    name: str = Field(description="Name of the RayCluster.")
    revision: str = Field(description="Hash of what rolls: spec and resolved inputs.")
    state: StoredState = Field(description="What the engine of this group does.")
    reason: ReasonText = Field(description="Why, as one word.")
    last_transition_time: str = Field(
        description="When `state` last changed.", json_schema_extra={"format": "date-time"}
    )
    restarts: int = Field(0, description="How often it failed and was made anew since it last served for 10 minutes.")
    next_retry_time: str | None = Field(
        None,
        description="When it is made anew; only while it waits for that.",
        json_schema_extra={"format": "date-time"},
    )
    failure: Failure | None = Field(None, description="What it failed of; absent while `restarts` is 0.")
    nodes: Annotated[tuple[NodeName, ...], BeforeValidator(_first_nodes)] = Field(
        (), max_length=_MAX_NODES, description="Nodes that hold its ranks, in the order of the ranks."
    )


class Model(ModelFacts):
    source: str = Field(description="spec.model.source that was inspected.")
    revision: str = Field("", description="spec.model.revision that was inspected; empty where none is given.")


class Figures(_Part):
    """One number of ranks for a model, with the memory and the context that follow from it."""

    tensor: int = Field(ge=1, le=1024, description="Ranks that share each layer.")
    pipeline: int = Field(ge=1, le=1024, description="Stages that share the layers.")
    pods: int = Field(ge=1, le=1024, description="Worker pods, each with pipeline / pods stages.")
    nodes: int = Field(description="Nodes that these pods fill, at the least; on CPU one a pod.")
    weights_bytes_per_rank: int = Field(description="Bytes of the largest rank's weights.")
    kv_tokens: int = Field(0, description="Tokens that the KV cache holds; where memory is unknown, at most.")
    max_model_len: int = Field(0, description="Longest prompt + output in tokens.")
    concurrent_requests: int = Field(0, description="Requests of maxModelLen tokens that have room at once.")

    @property
    def shape(self) -> str:
        return f"TP{self.tensor}xPP{self.pipeline}"

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


class Candidate(Figures):
    fits: bool = Field(description="Whether the model fits.")
    why_not: Message = Field("", description="Why the model does not fit; empty when it does.")


class Sizing(Figures):
    advice: Message = Field("", description="A better use of the accelerators; empty when there is none.")
    accelerator_memory: int | None = Field(
        None,
        ge=1,
        le=1 << 60,
        description="Bytes of one accelerator by the nodes' labels; absent where spec.accelerator.memory is given.",
    )
    accelerator_nodes: str | None = Field(
        None,
        description="The nodes with those labels: accelerator.resource and scheduling.nodeSelector of that time.",
    )
    inputs: str = Field(description="Hash of the inputs. While it is equal, the choice stays.")
    alternatives: tuple[Candidate, ...] = Field((), max_length=8, description="Other candidates, the cheapest first.")


def stored_sizing(status: Mapping[str, Any]) -> Sizing | None:
    """The sizing in a status document; None where there is none, or none that an operator could have written."""
    try:
        found = Sizing.model_validate(status["sizing"], strict=False)
    except (KeyError, ValidationError):
        return None
    return found if found.pipeline % found.pods == 0 else None


def stored_model(status: Mapping[str, Any]) -> Model | None:
    """The model in a status document; None where there is none, or this version cannot use it.

    Unusable are facts that lack a field, and numbers beyond their bounds.
    """
    try:
        return Model.model_validate(status["model"])
    except (KeyError, ValidationError):
        return None


def stored_rollout(status: Mapping[str, Any]) -> RolloutState:
    """What a status document remembers of rolls. What this version cannot read is as good as not there."""
    try:
        return RolloutState.model_validate(status.get("rollout", {}))
    except ValidationError:
        return RolloutState()


class Status(_Part):
    observed_generation: int = Field(0, description="metadata.generation of the spec that this status is about.")
    conditions: tuple[Condition, ...] = Field(
        (),
        description="What holds: Accepted, ModelReady, Scheduled, Available, Degraded, Progressing, RolledBack, "
        "Paused.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    shape: str = Field("", description="Tensor and pipeline parallelism, such as TP1xPP2.")
    model: Model | None = Field(
        None, description="The facts that the inspection of spec.model found. Absent for a built-in model."
    )
    sizing: Sizing | None = Field(None, description="How the shape was chosen. Absent until the model is known.")
    ready: str = Field("", description="Engines that serve, of those asked for, such as 1/1.")
    loading: str | None = Field(
        None,
        description="How far the first engine that starts is, such as 41 of 131 GB; a moment old. Absent while none "
        "loads anything that has a size.",
    )
    endpoint: str = Field("", description="URL of the API inside the cluster.")
    replicas: int = Field(0, description="Engines that exist.")
    ready_replicas: int = Field(0, description="Engines that take requests.")
    available_replicas: int = Field(0, description="Engines that make tokens.")
    updated_replicas: int = Field(0, description="Engines of the spec's own revision.")
    selector: str = Field("", description="Label selector of the engines' head pods, one for each engine.")
    current_revision: str = Field("", description="Revision that has proven itself, or the first one.")
    update_revision: str = Field(
        "",
        description="Revision of the spec that is applied; other than the current one "
        "during a roll, and after one that failed.",
    )
    progress: str = Field(
        "", description="What the last roll does or came to, such as Analyzing, Complete or RolledBack: AnalysisFailed."
    )
    rollout: RolloutState | None = Field(None, description="What is remembered of rolls. Absent before the first.")
    image: str = Field(
        "",
        description="Image of the update revision where the spec names none: the operator's default of that time.",
    )
    groups: tuple[Group, ...] = Field(
        (),
        description="The engines, each a RayCluster.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
