"""Observations of a service: its RayClusters, their pods, and the answers of its engines. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rayloom_operator.api.status import Reason
from rayloom_operator.engines.progress import NO_PROGRESS, StartProgress
from rayloom_operator.engines.status import MAX_RANKS, EngineStatus
from rayloom_operator.texts import head, plain

# The pods that KubeRay has created for an engine replica within this many seconds are counted. A high number means that
# the replica's pods keep failing, because KubeRay replaces each failed pod at once.
NEW_POD_S = 600.0
MAX_MESSAGE = 600  # the largest number of characters that a message in the status quotes from another program's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state or the fault of a pod or an engine replica: a reason and a sentence."""

    reason: Reason
    message: str
    is_loaded: bool = False  # every rank has loaded the model


def refused_pod(message: str) -> Verdict:
    """Returns the verdict on a pod that the API server refused to create with this message."""
    cause = head(plain(message), MAX_MESSAGE)
    return Verdict(
        reason=Reason.CONTAINER_FAILED,
        message=f"the API server refused a pod: {cause} Change the spec, or the rule that forbids it.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod, with its fault, if it has one."""

    namespace: str
    name: str
    uid: str
    ip: str  # the pod's IP address; empty until it has one
    node: str  # name of the pod's node; empty until the pod is scheduled
    is_head: bool
    is_ready: bool  # the pod's condition Ready, without which a Service sends it no requests
    is_engine_ready: bool  # the engine accepts requests; False for workers
    is_routed: bool  # the pod carries the route label
    is_mounting: bool  # the pod is scheduled, and its containers wait, perhaps for volumes
    running_since: datetime | None  # start of the container that started last; None while any container does not run
    is_exhausted: bool  # the engine gave up, or a container keeps crashing; False if only settings are wrong
    num_engine_starts: int  # restarts of the engine's container: 0 after its first start
    owner_uid: str  # uid of the pod's RayCluster
    grace_s: float | None  # the grace period of a terminating pod; None for other pods
    fault: Verdict | None
    stays_when_cordoned: bool = False  # the pod tolerates a cordoned node
    models_label: str = ""  # value of a gateway pod's MODELS_LABEL; empty without this label
    was_starved: bool = False  # a container was killed for lack of memory (OOMKilled), and may have been restarted

    @property
    def is_running(self) -> bool:
        """Returns whether every container runs."""
        return self.running_since is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The last answer of an engine's /status. Times are seconds of the event loop's clock."""

    status: EngineStatus | None  # None before the first answer
    at: float  # time of the last answer; infinity before the first answer
    failing_since: float | None  # time of the first unanswered request; None if the last request was answered
    error: str  # why the last request was not answered; empty after an answer
    advanced_at: float  # time at which the engine last served, or its start last made progress
    start: StartProgress = NO_PROGRESS  # the last reported progress of the engine's start


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReplica:
    """A RayCluster and its pods, without terminating pods."""

    name: str  # name of the RayCluster
    revision: str
    uid: str
    pods: tuple[Pod, ...]
    refusal: str  # the reason why KubeRay could not create a pod; empty if there is no such pod
    is_headless: bool  # the head pod existed and is gone; KubeRay does not recreate it
    num_new_pods: int  # number of pods, including deleted pods, that were created within the last NEW_POD_S seconds
    reading: Reading | None  # None until the poller has an answer, or has failed to get one
    num_ranks: int = MAX_RANKS  # an upper bound of the number of ranks
    is_found: bool = False  # an EndpointSlice of the service lists the head pod, so clients can reach the engine
    is_cordoned: bool = False  # a pod is on a cordoned node, and does not tolerate the cordon
    # A pod is on a cordoned node and tolerates the cordon. The pod's replacement might be placed there again, so moving
    # the replica is of no use.
    is_tolerant: bool = False
    is_suspended: bool = False  # KubeRay creates no pods: a queue has not admitted the RayCluster, or has evicted it
    is_head_evicted: bool = False  # another client deleted or evicted the head pod, on a node that is ready

    @property
    def head(self) -> Pod | None:
        return next((pod for pod in self.pods if pod.is_head), None)

    @property
    def fault(self) -> Verdict | None:
        """The fault of the head pod, else `workers_fault`."""
        return (self.head.fault if self.head else None) or self.workers_fault

    @property
    def workers_fault(self) -> Verdict | None:
        """The fault of a worker pod, else the reason why KubeRay could not create a pod."""
        found = next((pod.fault for pod in self.pods if pod.fault and not pod.is_head), None)
        if found is None and self.refusal:
            return refused_pod(self.refusal)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentProgress:
    """The progress of the gateway pods' Deployment, as the Deployment controller reports it."""

    is_seen: bool  # the controller has seen the last change of the Deployment
    num_pods: int  # without terminating pods
    num_updated: int  # pods with the present settings
    refusal: str = ""  # why a pod could not be created; empty if there is no such pod
    is_late: bool = False  # no progress within the Deployment's progress deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGateway:
    """An LLMGateway whose pods send requests to a service."""

    name: str
    uid: str
    model: str  # the name of the service's model at this gateway
    replicas: int  # number of pods in the LLMGateway's spec
    pods: tuple[Pod, ...] = ()  # without terminating pods


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentReport:
    """A controller's report on whether a Gateway in an HTTPRoute's parentRefs accepts the route."""

    name: str
    namespace: str  # namespace of the Gateway; empty: the namespace of the HTTPRoute
    section_name: str | None
    port: int | None
    refused: str = ""  # Accepted or ResolvedRefs, whichever condition is False; empty if the Gateway accepts the route
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRoute:
    """An HTTPRoute or Ingress that leads to gateways."""

    uid: str
    created_at: datetime
    parents: tuple[ParentReport, ...] = ()  # the controllers' reports about the present spec of an HTTPRoute
    address: str = ""  # the first address that a controller wrote into an Ingress; empty if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that was observed of a service at one moment."""

    replicas: tuple[EngineReplica, ...] = ()
    gateways: tuple[Pod, ...] = ()  # gateway pods, without terminating pods
    gateway_progress: DeploymentProgress | None = None  # None if the gateway pods' Deployment is not known
    routes: Mapping[str, SeenRoute] = field(default_factory=dict)  # kind -> existing route to the gateways
    unknown_kinds: frozenset[str] = frozenset()  # kinds of routes that the API server does not know
    # The LLMGateways that send requests to the service; None while some LLMGateways of the namespace are unknown.
    llmgateways: tuple[ServingGateway, ...] | None = ()
    # Name of a polled pod -> its last answer. The pods are the gateway pods of the service and of `llmgateways`.
    gateway_readings: Mapping[str, Reading] = field(default_factory=dict)
    # Names that no new RayCluster may have. They belong to RayClusters that are terminating, that were deleted a moment
    # ago, or that are left over from a deleted service of this name.
    taken: frozenset[str] = frozenset()
    num_ending: int = 0  # terminating RayClusters; they hold their nodes until they are gone
    terminating_pods: tuple[Pod, ...] = ()  # terminating pods of all RayClusters
    lost_nodes: frozenset[str] = frozenset()  # nodes that have not been ready for `recovery.nodeLossSeconds`
    waits: tuple[datetime, ...] = ()  # times at which further nodes, which are not ready now, will count as lost
    knows_nodes: bool = True  # the watch of nodes works; without it, no node counts as cordoned
