"""TypedDicts with the fields that the operator reads from watched objects. `Kube` decodes the objects into these
TypedDicts.

The decoder skips every other field in the JSON text. If it decoded all fields, most of the time and memory of a LIST
request would go into dictionaries of whole pod templates and environments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypedDict

from rayloom_operator.names import MADE_VOLUMES, SERVICE_LABEL, Manifest


class OwnerFields(TypedDict, total=False):
    kind: str
    name: str
    uid: str


class MetadataFields(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    creationTimestamp: str | None
    deletionTimestamp: str
    deletionGracePeriodSeconds: int
    labels: dict[str, str]
    ownerReferences: list[OwnerFields]


class ConditionFields(TypedDict, total=False):
    type: str
    status: str
    reason: str
    message: str
    lastTransitionTime: str | None


class ConditionsFields(TypedDict, total=False):
    conditions: list[ConditionFields]


class IdentityFields(TypedDict, total=False):
    name: str
    namespace: str
    uid: str


class NamedFields(TypedDict):
    """The name, namespace and uid of an object of any kind."""

    metadata: IdentityFields


class OwnedFields(TypedDict, total=False):
    """The fields of a RayCluster or a Job: the metadata with the owner, and the conditions."""

    metadata: MetadataFields
    status: ConditionsFields


class WorkerGroupFields(TypedDict, total=False):
    replicas: Any
    rayStartParams: Any


class RayClusterSpecFields(TypedDict, total=False):
    workerGroupSpecs: list[WorkerGroupFields]


class RayClusterFields(OwnedFields, total=False):
    """A RayCluster with its worker groups, which give the number of the engine's ranks."""

    spec: RayClusterSpecFields


class ContainerFields(TypedDict, total=False):
    name: str
    image: str
    ready: bool
    state: Any
    lastState: Any
    restartCount: int


class PodStatusFields(ConditionsFields, total=False):
    phase: str
    reason: str
    message: str
    podIP: str
    initContainerStatuses: list[ContainerFields]
    containerStatuses: list[ContainerFields]


class VolumeFields(TypedDict):
    name: str


class PodSpecFields(TypedDict, total=False):
    nodeName: str
    volumes: list[VolumeFields]
    tolerations: list[Any]


class PodFields(TypedDict, total=False):
    metadata: MetadataFields
    spec: PodSpecFields
    status: PodStatusFields


class EndpointFields(TypedDict, total=False):
    conditions: Any
    targetRef: OwnerFields


class EndpointSliceFields(TypedDict, total=False):
    metadata: MetadataFields
    endpoints: list[EndpointFields] | None


def ray_cluster(found: Manifest) -> Manifest:
    """Returns a RayCluster with `numRanks` instead of its spec; `numRanks` is 0 if the spec lacks the number."""
    groups = found.pop("spec", {}).get("workerGroupSpecs", ())
    try:
        num_ranks = sum(int(each["replicas"]) * int(each["rayStartParams"]["num-cpus"]) for each in groups)
    except (KeyError, TypeError, ValueError):
        num_ranks = 0
    return found | {"numRanks": num_ranks}


def pod(found: Manifest) -> Manifest:
    """Returns a Pod without the volumes that the operator or the kubelet provides.

    `staysWhenCordoned` replaces the tolerations. It is True if the pod tolerates cordoned nodes. The scheduler may then
    place the pod's replacement on a cordoned node again.
    """
    spec = dict(found["spec"])
    spec["volumes"] = [each for each in spec.get("volumes", ()) if each["name"] not in MADE_VOLUMES]
    if any(map(_admits_cordoned, spec.pop("tolerations", ()))):
        spec["staysWhenCordoned"] = True
    return found | {"spec": spec}


def endpoint_slice(found: Manifest) -> Manifest:
    """Returns the `uids` of the pods to which an EndpointSlice sends the clients of an LLMService.

    Slices of a foreign Service that carries our label are ignored. An endpoint without a ready condition is ready, as
    https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/#ready says.
    """
    labels = found["metadata"]["labels"]
    is_ours = labels.get("kubernetes.io/service-name") == labels[SERVICE_LABEL]
    ready = (each for each in found.get("endpoints") or () if (each.get("conditions") or {}).get("ready") is not False)
    return {"uids": [each["targetRef"]["uid"] for each in ready if is_ours and each.get("targetRef")]}


def node_of(found: Manifest) -> str:
    """Returns the name of a Pod's node; empty before the pod is scheduled."""
    return sys.intern(found["spec"].get("nodeName", ""))


def _admits_cordoned(toleration: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", "NoSchedule"):
        return False
    is_of_all = toleration.get("operator") == "Exists" and not toleration.get("key")
    return is_of_all or toleration.get("key") == "node.kubernetes.io/unschedulable"
