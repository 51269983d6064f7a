"""What the operator sees of a service: its RayClusters, their pods, and what the engines say. Plain data, no clock.

`pod` reads one Pod document; what is wrong with it is said here as well, because only a pod knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from rayloom_operator.api.pod_template.reserved_parts import OWN_CONTAINERS, OWN_INIT_CONTAINERS, WORKER_CONTAINERS
from rayloom_operator.api.status import Reason
from rayloom_operator.engines.progress import NO_PROGRESS, StartProgress
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.names import (
    ENGINE_CONTAINER,
    INSPECT_CONTAINER,
    MODEL_VOLUME,
    NODE_TYPE_LABEL,
    ROUTE_LABEL,
    USER_VOLUMES,
    Manifest,
)
from rayloom_operator.texts import head, plain, tail
from rayloom_operator.times import moment

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CREATE_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
# Kubelets give these also while a volume cannot be mounted.
_MOUNT_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
_EXIT_CONFIG = 78  # the engine's: its settings or its model cannot be used, and a restart would not help
_EXIT_GIVEN_UP = 70  # the engine's: a process of it kept dying
# Kubelets start a container again at once and then ever more slowly. After so many ends the pod itself is in doubt.
_MAX_ENDS = 3
# The engine's last words are for people; these tell what is wrong with a model. The first that is found counts.
HUB_SENTENCES = {
    "the hub cannot be reached": Reason.HUB_UNREACHABLE,
    "accept its terms": Reason.MODEL_GATED,
    "the hub refuses": Reason.MODEL_NO_ACCESS,
}
NOT_FOUND = re.compile(r"no model|no such|there is no|does not exist", re.IGNORECASE)
_MAX_MESSAGE = 600
# Pods that KubeRay creates within this time count as one series of failed pods.
NEW_POD_S = 600.0
_MORE_ROOM = "Add nodes, or lower spec.engine.resources."
_MORE_DISK = (
    "The pod fetches or converts the model on its node's disk: give spec.model.cache a place, add nodes with larger "
    "disks, or set spec.engine.resources.requests.ephemeral-storage."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a pod or a group does, or what keeps it from its work, as a reason and a sentence."""

    reason: Reason
    message: str
    is_loaded: bool = False  # every rank has the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    namespace: str
    name: str
    uid: str
    ip: str  # empty until it has one
    node: str  # empty until it has one
    is_head: bool
    is_ready: bool  # as the Service sees it
    is_engine_ready: bool  # the engine takes requests; False for workers
    is_routed: bool  # carries the route label
    is_mounting: bool  # on a node, and its containers wait, for volumes perhaps
    running_since: datetime | None  # when the last of its containers was started; None while one does not run
    is_spent: bool  # its engine gave up, or a container keeps ending for another reason than its settings
    num_engine_starts: int  # 0 for the engine's first start
    owner_uid: str  # of its RayCluster
    grace_s: float | None  # how long it may take to end; None while it is to stay
    fault: Verdict | None
    stays_when_cordoned: bool = False  # it tolerates a node that is being emptied
    was_starved: bool = False  # a container ended for want of memory, and may have been started again

    @property
    def is_running(self) -> bool:
        """Every container runs."""
        return self.running_since is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an engine's /status said last. Seconds count from any fixed moment."""

    status: EngineStatus | None  # the last answer; None before the first
    at: float  # when the last answer came; infinity before the first
    failing_since: float | None  # when the first question without an answer was asked; None after an answer
    error: str  # why there was none; empty after an answer
    advanced_at: float  # when the engine last served, or got on with its start
    start: StartProgress = NO_PROGRESS  # how far its start was when that was last put into words


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One RayCluster and its pods, without those that are being deleted."""

    name: str
    revision: str
    uid: str
    pods: tuple[Pod, ...]
    refusal: str  # why KubeRay could not make a pod; empty when it could
    is_headless: bool  # its head pod was there and is gone; KubeRay makes no other
    num_new_pods: int  # pods that were made for it in the last minutes, also those that are gone
    reading: Reading | None  # None until its engine was asked
    is_found: bool = False  # clients find its head: an EndpointSlice of the service has the address
    is_cordoned: bool = False  # a pod of it is on a node that is being emptied, and does not tolerate that
    is_tolerant: bool = False  # the same of one that does: its successor may be put there again
    is_suspended: bool = False  # KubeRay makes no pods for it: a queue has not admitted it, or has taken it back
    is_told_to_go: bool = False  # its head pod was deleted or evicted, and not because its node is away

    @property
    def head(self) -> Pod | None:
        return next((pod for pod in self.pods if pod.is_head), None)

    @property
    def fault(self) -> Verdict | None:
        """The head's, before that of a worker."""
        return (self.head.fault if self.head else None) or self.workers_fault

    @property
    def workers_fault(self) -> Verdict | None:
        """What keeps a pod of the ranks from its work."""
        found = next((pod.fault for pod in self.pods if pod.fault and not pod.is_head), None)
        if found is None and self.refusal:
            return refused_pod(self.refusal)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that is seen of a service."""

    groups: tuple[Group, ...] = ()
    # Names of RayClusters that are on their way out, or gone since a moment, or of a deleted service of the same name.
    taken: frozenset[str] = frozenset()
    num_ending: int = 0  # RayClusters that are being deleted, and hold their nodes until they are gone
    leaving: tuple[Pod, ...] = ()  # pods that are being deleted, of any group
    lost_nodes: frozenset[str] = frozenset()  # not ready for so long that they are given up
    waits: tuple[datetime, ...] = ()  # when others will be
    knows_nodes: bool = True  # that a node is being emptied would be known


def cluster_refusal(cluster: Manifest) -> str:
    """Why KubeRay could not make a pod of a RayCluster, such as a quota; empty when it could."""
    failing = _condition(cluster, "ReplicaFailure")
    message = failing.get("message", "") if failing.get("status") == "True" else ""
    # The pattern of each name is compiled anew, and mostly there is no message.
    return without_suffixes(message, cluster["metadata"]["name"]) if message else ""


def without_suffixes(message: str, owner: str) -> str:
    """`message` about pods that `owner` was to have, without what is random in their names.

    Each attempt has a name of its own; what says the same is to be the same, or each would be written and told.
    """
    # Kubernetes cuts names of 58 characters and more before it adds the five.
    return re.sub(rf'"({re.escape(owner[:57])}[^"]*?)-?[a-z0-9]{{5}}"', r'"\1"', message)


def refused_pod(message: str) -> Verdict:
    message = f"the API server refused a pod: {_head(message)} Change the spec, or what forbids it."
    return Verdict(reason=Reason.CONTAINER_FAILED, message=message)


def is_headless(cluster: Manifest) -> bool:
    """Whether the RayCluster had its head pod, and has lost it. KubeRay's word, because pods are watched apart."""
    was_whole = _condition(cluster, "RayClusterProvisioned").get("status") == "True"  # it never goes back
    return was_whole and _condition(cluster, "HeadPodReady").get("reason") == "HeadPodNotFound"


def is_suspended(cluster: Manifest) -> bool:
    """Whether KubeRay keeps a RayCluster without pods, because its `spec.suspend` says so, which is Kueue's to set."""
    kinds = ("RayClusterSuspending", "RayClusterSuspended")
    return any(_condition(cluster, kind).get("status") == "True" for kind in kinds)


def _condition(document: Manifest, kind: str) -> Manifest:
    found = document.get("status", {}).get("conditions", ())
    return next((each for each in found if each["type"] == kind), {})


def pod(document: Manifest, mount_failure: str = "") -> Pod:
    """The pod in a Pod document. `mount_failure` is what the kubelet says about its volumes, from its events."""
    meta, spec, status = document["metadata"], document["spec"], document.get("status", {})
    labels = meta.get("labels", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    containers = {container["name"]: container for container in status.get("containerStatuses", ())}
    everything = [*status.get("initContainerStatuses", ()), *containers.values()]
    waiting = [container["state"].get("waiting", {}).get("reason") for container in everything]
    scheduled, fault = conditions.get("PodScheduled", {}), None
    if (scheduled.get("status"), scheduled.get("reason")) == ("False", "Unschedulable"):
        cause = _head(scheduled.get("message", ""))
        cure = _MORE_DISK if "Insufficient ephemeral-storage" in cause else _MORE_ROOM
        cure = "Make the claim, or change spec.model." if "persistentvolumeclaim" in cause else cure
        message = f"pod {meta['name']} finds no node: {cause} {cure}"
        fault = Verdict(reason=Reason.UNSCHEDULABLE, message=message)
    elif any(f'"{volume}"' in mount_failure for volume in _volumes_beside_the_model(spec)):
        message = f"pod {meta['name']} cannot mount what the spec names: {_head(mount_failure)}. Make it, or change "
        fault = Verdict(reason=Reason.CONTAINER_FAILED, message=message + "the spec.")
    elif mount_failure:
        message = f"pod {meta['name']} cannot mount the model: {_head(mount_failure)}. Put the model at this path on "
        fault = Verdict(reason=Reason.MODEL_NOT_FOUND, message=message + "every node, or change spec.model.source.")
    elif status.get("phase") == "Failed":
        cause = f"{status.get('reason', 'Failed')}: {_head(status.get('message', ''))}"
        fault = Verdict(reason=Reason.CONTAINER_FAILED, message=f"pod {meta['name']} has failed ({cause})")
    starts = [container["state"].get("running", {}).get("startedAt", "") for container in containers.values()]
    is_running = bool(containers) and all("running" in container["state"] for container in containers.values())
    owner = next((owner["uid"] for owner in meta.get("ownerReferences", ())), "")
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        is_head=labels.get(NODE_TYPE_LABEL) == "head",
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_engine_ready=containers.get(ENGINE_CONTAINER, {}).get("ready", False),
        is_routed=labels.get(ROUTE_LABEL) == "true",
        is_mounting=bool(waiting) and all(reason in _MOUNT_REASONS for reason in waiting),
        running_since=moment(max(starts)) if is_running else None,
        is_spent=any(_is_spent(container) for container in containers.values()),
        num_engine_starts=containers.get(ENGINE_CONTAINER, {}).get("restartCount", 0),
        owner_uid=owner,
        stays_when_cordoned=spec.get("staysWhenCordoned", False),
        grace_s=meta.get("deletionGracePeriodSeconds", 0) if "deletionTimestamp" in meta else None,
        fault=fault
        or next((found for container in everything if (found := _container_fault(meta["name"], container))), None),
        was_starved=any(_last_end(container).get("reason") == "OOMKilled" for container in everything),
    )


def _volumes_beside_the_model(spec: Manifest) -> set[str]:
    return {*USER_VOLUMES, *(volume["name"] for volume in spec.get("volumes", ()))} - {MODEL_VOLUME}


def _last_end(container: Manifest) -> Manifest:
    """How the container ended last; empty when it never did."""
    return container["state"].get("terminated") or container.get("lastState", {}).get("terminated") or {}


def _is_spent(container: Manifest) -> bool:
    """Whether the container has ended and another start in its place promises nothing."""
    ended = _last_end(container)
    if "running" in container["state"] or not ended:
        return False
    if container["name"] == ENGINE_CONTAINER and ended["exitCode"] in (_EXIT_CONFIG, _EXIT_GIVEN_UP):
        return bool(ended["exitCode"] == _EXIT_GIVEN_UP)
    # Kubelets say so only of one that has ended more than once within minutes.
    is_backing_off = container["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff"
    return is_backing_off and bool(container.get("restartCount", 0) >= _MAX_ENDS)


def _container_fault(pod_name: str, container: Manifest) -> Verdict | None:
    where = f"container {container['name']} of pod {pod_name}"
    waiting = container["state"].get("waiting", {})
    reason, message = waiting.get("reason", ""), _head(waiting.get("message", ""))
    if reason in _IMAGE_REASONS:
        return Verdict(
            reason=Reason.IMAGE_PULL_FAILED,
            message=f"image {container['image']} cannot be pulled ({reason}: {message}). "
            f"Check {_image_field(container)} and whether the nodes can reach its registry.",
        )
    if reason in _CREATE_REASONS:
        return Verdict(reason=Reason.CONTAINER_FAILED, message=f"{where} cannot start: {reason}: {message}")
    ended = _last_end(container)
    if not ended or container.get("ready", False) or ended["exitCode"] == 0:
        return None
    code, words = ended["exitCode"], _tail(ended.get("message", ""))
    if container["name"] == ENGINE_CONTAINER and code == _EXIT_CONFIG:
        otherwise = Reason.MODEL_NOT_FOUND if NOT_FOUND.search(words) else Reason.MODEL_UNUSABLE
        kind = next((reason for sentence, reason in HUB_SENTENCES.items() if sentence in words), otherwise)
        return Verdict(reason=kind, message=words or f"{where} cannot serve this model; its log says why.")
    if container["name"] == ENGINE_CONTAINER and code == _EXIT_GIVEN_UP:
        return Verdict(reason=Reason.ENGINE_FAILED, message=f"The engine gave up: {words}")
    if "running" in container["state"]:
        return None  # It was started again, and may do better.
    kind = Reason.ENGINE_FAILED if container["name"] == ENGINE_CONTAINER else Reason.CONTAINER_FAILED
    cause = f"{ended.get('reason', 'Error')}, exit code {code}"
    cure = f". Raise {_memory_field(container)}." if ended.get("reason") == "OOMKilled" else ""
    message = f"{where} ended ({cause}): {words or 'it left no message; see its log'}{cure}"
    return Verdict(reason=kind, message=message)


def _memory_field(container: Manifest) -> str:
    if container["name"] in (*WORKER_CONTAINERS, INSPECT_CONTAINER):
        return "spec.engine.resources.limits.memory"
    return f"resources.limits.memory of container {container['name']} in spec.podTemplate"


def _image_field(container: Manifest) -> str:
    is_ours = container["name"] in (*OWN_CONTAINERS, *OWN_INIT_CONTAINERS, INSPECT_CONTAINER)
    return "spec.engine.image" if is_ours else f"the image of container {container['name']} in spec.podTemplate"


def _head(text: str) -> str:
    return head(plain(text), _MAX_MESSAGE)


def _tail(text: str) -> str:
    """Of a log the end counts."""
    return tail(plain(text), _MAX_MESSAGE)
