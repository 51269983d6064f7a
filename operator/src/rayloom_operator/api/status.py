"""The status of LLMService v1alpha1. The CRD's schema is generated from these classes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from rayloom_operator.api.adapters import MAX_ADAPTERS
from rayloom_operator.api.autoscaling.state import ScalingState
from rayloom_operator.api.autoscaling.stored import AutoscalingStatus
from rayloom_operator.api.base import Message, StatusPart
from rayloom_operator.api.draft_facts import DraftFacts
from rayloom_operator.api.gateway.stored import GatewayStatus
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.api.sizing_status import SizingStatus


class Reason(StrEnum):
    """Every reason that a condition may have: a closed list, because alerts and scripts may depend on any reason."""

    VALID = "Valid"  # condition Accepted
    INVALID_SPEC = "InvalidSpec"  # conditions Accepted, and Available while no engine of an earlier spec runs
    DOES_NOT_FIT = "DoesNotFit"  # the model needs more memory than there is; conditions as for InvalidSpec
    NOT_ALLOWED = "NotAllowed"  # operator's settings forbid part of a spec; conditions as for InvalidSpec, or Degraded
    APPLY_REFUSED = "ApplyRefused"  # the API server refused an object of the operator; condition Accepted
    UNSUPPORTED_KUBERAY = "UnsupportedKubeRay"  # KubeRay is missing in the cluster or too old; condition Accepted
    LOADED = "Loaded"  # condition ModelReady
    LOADING = "Loading"  # condition ModelReady
    INSPECTING = "Inspecting"  # a Job inspects the model before its engines are created
    MODEL_NOT_FOUND = "ModelNotFound"  # the model's folder or file is missing, or the hub has no such model or revision
    MODEL_NO_ACCESS = "ModelNoAccess"  # the hub requires a token, or the given token has no access
    MODEL_GATED = "ModelGated"  # the token's account has not accepted the model's terms
    MODEL_UNSUPPORTED = "ModelUnsupported"  # the engine does not support the architecture, or the kind of weights
    HUB_UNREACHABLE = "HubUnreachable"  # the hub does not answer; retried at growing intervals
    INSPECTION_FAILED = "InspectionFailed"  # the Job ended without a result; retried
    MODEL_UNUSABLE = "ModelUnusable"  # the engine cannot serve this model with these settings
    SERVING = "Serving"
    STARTING = "Starting"
    PODS_PENDING = "PodsPending"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_FAILED = "ContainerFailed"  # a pod or container cannot be created, or a Ray container keeps exiting
    ENGINE_FAILED = "EngineFailed"  # the engine's process exited, or the engine gave up
    ENGINE_UNREACHABLE = "EngineUnreachable"
    TOKENS_STOPPED = "TokensStopped"  # the engine reports that it serves, but no token passes through every rank
    RECOVERING = "Recovering"
    DRAINING = "Draining"
    HEAD_LOST = "HeadLost"  # the head pod is gone; the engine replica is recreated
    ENGINE_STUCK = "EngineStuck"  # no progress for longer than recovery.rebuildSeconds
    NODE_LOST = "NodeLost"  # a node with pods of the service is not ready; condition Degraded
    GROUP_BACK_OFF = "GroupBackOff"  # an engine keeps failing; the operator waits before it recreates the engine
    SCHEDULED = "Scheduled"  # condition Scheduled
    HEALTHY = "Healthy"  # condition Degraded is False
    SUSPENDED = "Suspended"  # spec.replicas is 0; conditions Available, Scheduled and ModelReady
    # the scaler set spec.replicas to 0; a request starts an engine; conditions as for Suspended
    SCALED_TO_ZERO = "ScaledToZero"
    ADAPTER_FAILED = "AdapterFailed"  # an engine cannot load a LoRA adapter; condition Degraded
    GATEWAY_NOT_READY = "GatewayNotReady"  # an engine serves, but no gateway pod accepts requests; condition Available
    # a Gateway refuses the HTTPRoute, or no Gateway answers; condition Degraded
    ROUTE_NOT_ACCEPTED = "RouteNotAccepted"
    ROUTE_REFUSED = "RouteRefused"  # HTTPRoute or Ingress cannot be written; condition Degraded
    GATEWAY_API_MISSING = "GatewayApiMissing"  # the cluster has no HTTPRoutes; condition Degraded
    # Reasons of an LLMGateway alone:
    NO_MODELS = "NoModels"  # no selected service can be reached; condition Available
    NO_GATEWAY_PORT = "NoGatewayPort"  # a selected service has no spec.gateway; condition Degraded
    NAME_CONFLICT = "NameConflict"  # a name belongs to two services, or to an alias and a service; condition Degraded
    TARGET_MISSING = "TargetMissing"  # an alias names a service that cannot be reached; condition Degraded
    KEYS_DIFFER = "KeysDiffer"  # an alias without keys has targets with different keys; condition Degraded
    KEYS_MISSING = "KeysMissing"  # gateway pods find no API keys in the Secret that `auth` names; condition Degraded
    MODELS_REFUSED = "ModelsRefused"  # a gateway pod cannot use the list of models; condition Degraded
    READING_MODELS = "ReadingModels"  # not every gateway pod has read the list of models; condition Progressing
    # Reasons of condition Progressing: the values of `decide.rollout.phases.RolloutStep`. STARTING is listed above.
    COMPLETE = "Complete"
    SCALING = "Scaling"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    ANALYZING = "Analyzing"
    PROMOTING = "Promoting"
    MOVING = "Moving"
    REPLACING = "Replacing"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"  # also a reason of the condition Paused
    HALTED = "Halted"
    # Reasons of condition RolledBack for a revision that failed:
    ANALYSIS_FAILED = "AnalysisFailed"
    CRASH_LOOP = "CrashLoop"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NOT_ROLLED_BACK = "NotRolledBack"  # condition RolledBack is False
    NOT_PAUSED = "NotPaused"  # condition Paused is False


_COURSE = (
    *(Reason.LOADING, Reason.INSPECTING, Reason.STARTING, Reason.PODS_PENDING, Reason.RECOVERING, Reason.DRAINING),
    *(Reason.GATEWAY_NOT_READY, Reason.READING_MODELS),
)
# Steps of a rollout that require no action of an admin.
STEPS = frozenset(
    {
        *(Reason.COMPLETE, Reason.SCALING, Reason.ANALYZING, Reason.PROMOTING, Reason.MOVING, Reason.REPLACING),
        *(Reason.STARTING, Reason.PAUSED),
    }
)
# Reasons on which an admin has to act. Each becomes a Warning Event. Excluded are healthy states, states that pass by
# themselves, and a pause that the user asked for.
FAULTS = frozenset(Reason) - {
    *(Reason.VALID, Reason.LOADED, Reason.SERVING, Reason.SCHEDULED, Reason.HEALTHY, Reason.SUSPENDED),
    *(Reason.SCALED_TO_ZERO, Reason.NOT_ROLLED_BACK, Reason.NOT_PAUSED),
    *_COURSE,
    *STEPS,
}

ConditionType: TypeAlias = Literal[
    "Accepted", "ModelReady", "Scheduled", "Available", "Degraded", "Progressing", "RolledBack", "Paused"
]
AdapterState: TypeAlias = Literal["Loaded", "Loading", "Failed"]
GroupState: TypeAlias = Literal["Pending", "Starting", "Serving", "Recovering", "Draining", "BackOff", "Failed"]


_REASONS = frozenset(Reason)

# The CRD allows any text as the reason. Without the chart's `crds.install`, a cluster's CRD may be older than the
# operator, but must still accept the operator's reasons. A newer operator may also have written a reason that this
# operator does not know. This operator reads such a reason as EngineFailed. If this operator rejected the reason, it
# could not read the entry of `groups` with the engine's failures.
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


class Condition(StatusPart):
    type: ConditionType = Field(
        description="Accepted: the spec can be used. ModelReady: every rank of an engine has loaded the model. "
        "Scheduled: every pod has a node. Available: a token went through every rank of an engine a moment ago, and "
        "requests reach this engine. Degraded: a rank, engine or node has failed; other engines may serve. "
        "Progressing: engines "
        "are created, replaced or deleted. RolledBack: the spec's revision failed, and the revision before it runs. "
        "Paused: spec.rollout.paused stops a rollout."
    )
    status: Literal["True", "False"] = Field(description="Status of the condition.")
    reason: ReasonText = Field(description="The cause, as one word of a closed list.")
    message: Message = Field(description="The cause and the action that is needed, as sentences.")
    observed_generation: int = Field(description="metadata.generation of the spec that the condition is about.")
    last_transition_time: str = Field(
        description="Time at which `status` last changed.", json_schema_extra={"format": "date-time"}
    )


class Failure(StatusPart):
    uid: str = Field(
        description="uid of the RayCluster that failed last; empty if its engine served again before the deletion."
    )
    reason: ReasonText = Field(description="Cause of the first failure since the engine last served for 10 minutes.")
    message: Message = Field(
        description="The cause as a sentence. If a container ended, the message has the last lines of its log."
    )
    time: str = Field(description="Time of the last failure.", json_schema_extra={"format": "date-time"})


class GroupStatus(StatusPart):
    name: str = Field(description="Name of the RayCluster.")
    revision: str = Field(
        description="Hash of the fields of the spec, and of the resolved inputs, whose change starts a rollout."
    )
    state: StoredState = Field(description="State of the engine.")
    reason: ReasonText = Field(description="Cause of the state, as one word.")
    last_transition_time: str = Field(
        description="Time at which `state` last changed.", json_schema_extra={"format": "date-time"}
    )
    restarts: int = Field(
        0,
        description="Number of failures since the engine last served for 10 minutes. The operator recreates the engine "
        "after each failure. Evictions of the head pod are not counted.",
    )
    next_retry_time: str | None = Field(
        None,
        description="Time at which the operator recreates the engine; absent unless the operator waits for this time.",
        json_schema_extra={"format": "date-time"},
    )
    failure: Failure | None = Field(
        None,
        description="Failure or eviction after which the operator last recreated the engine, or recreates it now. "
        "Absent once the engine has served for 10 minutes. If `restarts` is 0, absent once the engine serves.",
    )
    nodes: Annotated[tuple[NodeName, ...], BeforeValidator(_first_nodes)] = Field(
        (), max_length=_MAX_NODES, description="Names of the nodes with the engine's ranks, in the order of the ranks."
    )


class AdapterStatus(StatusPart):
    name: str = Field(description="Name of the adapter.")
    state: AdapterState = Field(
        description="Loaded: every engine has it. Loading: not every engine has it yet. Failed: an engine cannot load "
        "it, and tries again every 30 s."
    )
    message: Message = Field("", description="The engine, and why it cannot load the adapter; empty unless Failed.")
    loaded: str = Field(description="Engines that have the adapter, of all engines, such as 2/3.")
    source: str | None = Field(
        None, max_length=512, description="Source of an adapter of the hub, as in the spec; absent for other adapters."
    )
    commit: str | None = Field(
        None, max_length=40, description="Commit of an adapter of the hub, for all engines; absent until one has it."
    )


class InspectedDraft(DraftFacts):
    source: str = Field(description="spec.model.draft.source that was inspected.")
    revision: str = Field("", description="spec.model.draft.revision that was inspected; empty where none is given.")


class InspectedModel(ModelFacts):
    source: str = Field(description="spec.model.source that was inspected.")
    revision: str = Field("", description="spec.model.revision that was inspected; empty where none is given.")
    draft: InspectedDraft | None = Field(None, description="The draft model. Absent without spec.model.draft.")


def stored_model(status: Mapping[str, Any]) -> InspectedModel | None:
    """Returns the model in a status document; None if the model or one of its fields is missing, or if a number is out
    of bounds.

    If only its draft model cannot be read, the model is returned without it, so that the model keeps its commit.
    """
    document = status.get("model")
    parts = document if isinstance(document, Mapping) else {}
    for given in (document, {name: part for name, part in parts.items() if name != "draft"}):
        try:
            return InspectedModel.model_validate(given)
        except ValidationError:
            continue
    return None


def stored_rollout(status: Mapping[str, Any]) -> RolloutState:
    """Returns the rollout state in a status document; an empty state if there is none, or if it cannot be read."""
    try:
        return RolloutStatus.model_validate(status.get("rollout", {})).state()
    except ValidationError:
        return RolloutState()


def stored_autoscaling(status: Mapping[str, Any]) -> ScalingState:
    """Returns the scaler's state in a status document; an empty state if there is none, or if it cannot be read."""
    try:
        return AutoscalingStatus.model_validate(status.get("autoscaling", {})).state()
    except ValidationError:
        return ScalingState()


def stored_gateway(status: Mapping[str, Any]) -> GatewayStatus | None:
    """Returns the gateway in a status document; None if there is none.

    A gateway that cannot be read is returned with one pod, because objects of the gateway may exist.
    """
    if "gateway" not in status:
        return None
    try:
        return GatewayStatus.model_validate(status["gateway"])
    except ValidationError:
        return GatewayStatus(replicas=1)


class Status(StatusPart):
    observed_generation: int = Field(0, description="metadata.generation of the spec that the status is about.")
    conditions: tuple[Condition, ...] = Field(
        (),
        description="The conditions Accepted, ModelReady, Scheduled, Available, Degraded, Progressing, RolledBack, "
        "and Paused.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    shape: str = Field("", description="Tensor and pipeline parallelism, such as TP1xPP2.")
    model: InspectedModel | None = Field(
        None,
        description="The facts that the inspection of spec.model found. Absent for a built-in model, unless its draft "
        "model is not built in.",
    )
    sizing: SizingStatus | None = Field(
        None, description="The chosen shape, its inputs and its alternatives. Absent until the model is known."
    )
    adapters: tuple[AdapterStatus, ...] | None = Field(
        None, max_length=MAX_ADAPTERS, description="The LoRA adapters of the spec. Absent if there are none."
    )
    ready: str = Field("", description="Engines that serve, of the number in spec.replicas, such as 1/1.")
    loading: str | None = Field(
        None,
        description="Bytes that the first starting engine had loaded some seconds ago, such as 41 of 131 GB. Absent "
        "unless an engine is in a phase of its start that counts bytes.",
    )
    endpoint: str = Field("", description="URL of the API inside the cluster.")
    replicas: int = Field(0, description="Engines that exist.")
    ready_replicas: int = Field(
        0, description="Engines whose container in the head pod is ready, so that they accept requests."
    )
    available_replicas: int = Field(
        0, description="Engines that serve: tokens go through every rank, and requests reach the engine."
    )
    updated_replicas: int = Field(0, description="Engines of the spec's revision.")
    selector: str = Field("", description="Label selector of the engines' head pods, one for each engine.")
    current_revision: str = Field(
        "", description="Revision whose rollout succeeded last; before any rollout, the first revision."
    )
    update_revision: str = Field(
        "",
        description="Revision of the last usable spec. It differs from currentRevision during a rollout, and after a "
        "rollout that failed.",
    )
    progress: str = Field(
        "",
        description="Step of the last rollout, such as Analyzing or Complete. If the rollout failed, also the reason, "
        "such as RolledBack: AnalysisFailed.",
    )
    rollout: RolloutStatus | None = Field(
        None, description="State of rollouts, as the operator stores it. Absent before the first reconcile."
    )
    autoscaling: AutoscalingStatus | None = Field(
        None, description="The last decision about spec.replicas. Absent without spec.autoscaling."
    )
    gateway: GatewayStatus | None = Field(
        None, description="The gateway pods. Absent without spec.gateway, once its objects are deleted."
    )
    image: str = Field(
        "",
        description="Image of the update revision, if the spec names no image: the operator's default at the time when "
        "the revision began. Empty if the spec names an image.",
    )
    groups: tuple[GroupStatus, ...] = Field(
        (),
        description="The engines, each a RayCluster.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
