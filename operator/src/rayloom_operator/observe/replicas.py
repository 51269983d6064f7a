"""Groups the documents of a service into its engine replicas: RayClusters with their pods. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from rayloom_operator.engines.status import MAX_RANKS
from rayloom_operator.names import GATEWAY_LABEL, Manifest, revision_of
from rayloom_operator.objects.ownership import is_owned
from rayloom_operator.observe.observed import EngineReplica, Pod
from rayloom_operator.observe.pods import pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The objects of one service in the caches of the watches, and what the observer has recorded of earlier pods."""

    service_uid: str
    clusters: Sequence[Manifest] = ()  # RayClusters that carry the service's label
    pods: Sequence[Manifest] = ()  # pods that carry the service's label
    slices: Sequence[Manifest] = ()  # EndpointSlices of the service
    cordoned: Set[str] = frozenset()  # names of cordoned nodes
    mount_failures: Mapping[str, str] = field(default_factory=dict)  # uid of a pod -> the kubelet's message
    num_new_pods: Mapping[str, int] = field(default_factory=dict)  # RayCluster's uid -> pods created within NEW_POD_S
    evicted: Set[str] = frozenset()  # uids of RayClusters whose head pods another client deleted or evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    replicas: tuple[EngineReplica, ...]
    gateways: tuple[Pod, ...]  # gateway pods, without terminating pods
    terminating_pods: tuple[Pod, ...]  # terminating pods of any RayCluster and of the gateway
    taken: frozenset[str]  # names of RayClusters that are terminating, or belong to a deleted service of this name
    num_ending: int  # terminating RayClusters of this service


def group(documents: Documents) -> Grouped:
    """Returns the engine replicas and gateway pods of the service. The observer sets `reading`, which is None here."""
    remaining = [each for each in documents.pods if not _is_terminating(each)]
    found = {uid for each in documents.slices for uid in each["uids"]}
    replicas, taken, num_ending = [], set(), 0
    for cluster in documents.clusters:
        meta = cluster["metadata"]
        is_ours = is_owned(meta, documents.service_uid)
        if is_ours and not _is_terminating(cluster):
            # The owner is compared by uid, because pods of an earlier RayCluster of this name may be left.
            own = [each for each in remaining if is_owned(each["metadata"], meta["uid"])]
            replicas.append(_replica(cluster, own, found, documents))
            continue
        taken.add(meta["name"])
        num_ending += is_ours
    return Grouped(
        replicas=tuple(replicas),
        gateways=tuple(
            pod(each, documents.mount_failures.get(each["metadata"]["uid"], ""))
            for each in remaining
            if GATEWAY_LABEL in each["metadata"]["labels"]
        ),
        terminating_pods=tuple(pod(each) for each in documents.pods if _is_terminating(each)),
        taken=frozenset(taken),
        num_ending=num_ending,
    )


def _is_terminating(document: Manifest) -> bool:
    return "deletionTimestamp" in document["metadata"]


def _replica(cluster: Manifest, own: Sequence[Manifest], found: Set[str], documents: Documents) -> EngineReplica:
    """Returns the engine replica of a RayCluster and its pods. `found`: uids of the pods in EndpointSlices."""
    name, uid = cluster["metadata"]["name"], cluster["metadata"]["uid"]
    pods = tuple(pod(each, documents.mount_failures.get(each["metadata"]["uid"], "")) for each in own)
    on_cordoned = {each.stays_when_cordoned for each in pods if each.node in documents.cordoned}
    return EngineReplica(
        name=name,
        revision=revision_of(name),
        uid=uid,
        pods=pods,
        refusal=cluster_refusal(cluster),
        is_headless=is_headless(cluster),
        num_new_pods=documents.num_new_pods.get(uid, 0),
        reading=None,
        num_ranks=cluster["numRanks"] or MAX_RANKS,
        is_found=any(each.is_head and each.uid in found for each in pods),
        is_cordoned=False in on_cordoned,
        is_tolerant=True in on_cordoned,
        is_suspended=is_suspended(cluster),
        is_head_evicted=uid in documents.evicted,
    )


def cluster_refusal(cluster: Manifest) -> str:
    """Returns the reason (such as a quota) why KubeRay could not create a pod; empty if KubeRay reports no failure.

    Reasons such as FailedDeleteHeadPod do not count: KubeRay also deletes pods that have ended, and reports a failure
    if such a pod is gone by then.
    """
    failing = _condition(cluster, "ReplicaFailure")
    is_refused = failing.get("status") == "True" and not failing.get("reason", "").startswith("FailedDelete")
    message = failing.get("message", "") if is_refused else ""
    # Without a message, which is the usual case, no time is spent on compiling a pattern for the name.
    return without_suffixes(message, cluster["metadata"]["name"]) if message else ""


def without_suffixes(message: str, owner: str) -> str:
    """Returns `message` about pods of `owner` without the random ends of the pods' names.

    Each attempt to create a pod uses a new random end. If the message kept that end, each attempt would cause a status
    write and an Event.
    """
    # Kubernetes cuts names of 58 characters and more before it appends five random characters.
    return re.sub(rf'"({re.escape(owner[:57])}[^"]*?)-?[a-z0-9]{{5}}"', r'"\1"', message)


def is_headless(cluster: Manifest) -> bool:
    """Returns whether the RayCluster had its head pod and has lost it.

    The result comes from KubeRay's conditions. The watch of pods cannot give it, because that watch may be ahead of or
    behind the watch of RayClusters.
    """
    # this condition never becomes False again
    was_whole = _condition(cluster, "RayClusterProvisioned").get("status") == "True"
    return was_whole and _condition(cluster, "HeadPodReady").get("reason") == "HeadPodNotFound"


def is_suspended(cluster: Manifest) -> bool:
    """Returns whether KubeRay keeps the RayCluster without pods because of its `spec.suspend`, which Kueue sets."""
    kinds = ("RayClusterSuspending", "RayClusterSuspended")
    return any(_condition(cluster, kind).get("status") == "True" for kind in kinds)


def _condition(document: Manifest, kind: str) -> Manifest:
    found = document.get("status", {}).get("conditions", ())
    return next((each for each in found if each["type"] == kind), {})
