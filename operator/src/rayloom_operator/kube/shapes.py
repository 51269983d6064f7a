"""What the operator reads of the objects that it watches: shapes into which Kube decodes them.

The rest, such as pod templates and environments, is skipped in the text. Made into dictionaries first, it would be most
of the time that a list takes, and of the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from rayloom_operator.names import MADE_VOLUMES, SERVICE_LABEL, Manifest


class Owner(TypedDict, total=False):
    kind: str
    name: str
    uid: str


class Metadata(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    creationTimestamp: str | None
    deletionTimestamp: str
    deletionGracePeriodSeconds: int
    labels: dict[str, str]
    ownerReferences: list[Owner]


class Condition(TypedDict, total=False):
    type: str
    status: str
    reason: str
    message: str
    lastTransitionTime: str | None


class Conditions(TypedDict, total=False):
    conditions: list[Condition]


class Owned(TypedDict, total=False):
    """Of a RayCluster, who owns it and what KubeRay says of it; of a Job, whether it is over."""

    metadata: Metadata
    status: Conditions


class WorkerGroup(TypedDict, total=False):
    replicas: Any
    rayStartParams: Any


class RayClusterSpec(TypedDict, total=False):
    workerGroupSpecs: list[WorkerGroup]


class RayCluster(Owned, total=False):
    """With what says how many ranks its engine has."""

    spec: RayClusterSpec


class Container(TypedDict, total=False):
    name: str
    image: str
    ready: bool
    state: Any
    lastState: Any
    restartCount: int


class PodStatus(Conditions, total=False):
    phase: str
    reason: str
    message: str
    podIP: str
    initContainerStatuses: list[Container]
    containerStatuses: list[Container]


class Volume(TypedDict):
    name: str


class PodSpec(TypedDict, total=False):
    nodeName: str
    volumes: list[Volume]
    tolerations: list[Any]


class Pod(TypedDict, total=False):
    metadata: Metadata
    spec: PodSpec
    status: PodStatus


class Endpoint(TypedDict, total=False):
    conditions: Any
    targetRef: Owner


class EndpointSlice(TypedDict, total=False):
    metadata: Metadata
    endpoints: list[Endpoint] | None


def ray_cluster(found: Manifest) -> Manifest:
    """Of a RayCluster, what the observer reads, and how many ranks its engine has: 0 where that cannot be read."""
    groups = found.pop("spec", {}).get("workerGroupSpecs", ())
    try:
        num_ranks = sum(int(each["replicas"]) * int(each["rayStartParams"]["num-cpus"]) for each in groups)
    except (KeyError, TypeError, ValueError):
        num_ranks = 0
    return found | {"numRanks": num_ranks}


def pod(found: Manifest) -> Manifest:
    """Of a Pod, what `observed.pod` and the observer read."""
    spec = dict(found["spec"])
    spec["volumes"] = [each for each in spec.get("volumes", ()) if each["name"] not in MADE_VOLUMES]
    # The scheduler may put it back on such a node.
    if any(map(_admits_cordoned, spec.pop("tolerations", ()))):
        spec["staysWhenCordoned"] = True
    return found | {"spec": spec}


def endpoint_slice(found: Manifest) -> Manifest:
    """Of an EndpointSlice, the uids of the pods to which it sends the clients of an LLMService.

    Somebody else's Service may have our label, and so its slices. A pod of whose readiness nothing is said is ready.
    """
    labels = found["metadata"]["labels"]
    is_ours = labels.get("kubernetes.io/service-name") == labels[SERVICE_LABEL]
    ready = (each for each in found.get("endpoints") or () if (each.get("conditions") or {}).get("ready") is not False)
    return {"uids": [each["targetRef"]["uid"] for each in ready if is_ours and each.get("targetRef")]}


def node_of(found: Manifest) -> str:
    """Of a Pod, the node; empty while it has none."""
    return sys.intern(found["spec"].get("nodeName", ""))


def _admits_cordoned(toleration: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", "NoSchedule"):
        return False
    is_of_all = toleration.get("operator") == "Exists" and not toleration.get("key")
    return is_of_all or toleration.get("key") == "node.kubernetes.io/unschedulable"
