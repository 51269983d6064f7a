"""Looks at a service: its RayClusters, pods and nodes as they are cached, and what its engines said last."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from rayloom_operator import names
from rayloom_operator.engines.status import MAX_RANKS
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import NOT_FOUND, Kube, KubeError
from rayloom_operator.names import Manifest, ServiceKey, object_path
from rayloom_operator.objects.ownership import is_owned
from rayloom_operator.observe.observed import (
    NEW_POD_S,
    Group,
    Observed,
    cluster_refusal,
    is_headless,
    is_suspended,
    pod,
)
from rayloom_operator.observe.poller import EnginePoller, Target
from rayloom_operator.observe.watches import Watches
from rayloom_operator.times import moment

logger = logging.getLogger(__name__)

# A RayCluster's name is not given again for so long after it went, lest KubeRay take its successor for it.
_NAME_REST_S = 60.0
# Of a group, by namespace, uid of its service and name: the token of its admin port, and perhaps an older one.
AdminTokens = Callable[[str, str, str], tuple[str, str]]


class Observer:
    """Lives in one event loop."""

    def __init__(self, kube: Kube, watches: Watches, poller: EnginePoller, admin_tokens: AdminTokens) -> None:
        self._kube = kube
        self._clusters, self._pods, self._nodes = watches.clusters, watches.pods, watches.nodes
        self._endpoints = watches.endpoints
        self._poller = poller
        self._admin_tokens = admin_tokens
        self._new_pods: dict[ServiceKey, dict[str, tuple[str, datetime]]] = {}  # uid -> of which RayCluster, since when
        self._told_to_go: dict[ServiceKey, set[str]] = {}  # uids of RayClusters whose head pods were deleted
        # name of a RayCluster -> when it was found to be gone; None while it is there
        self._gone_at: dict[ServiceKey, dict[str, datetime | None]] = {}

    async def forget(self, key: ServiceKey, clock: datetime) -> float | None:
        """The service is gone. Gives after how many seconds to call this again; None when nothing is left of it."""
        self._poller.follow(key, {})
        self._new_pods.pop(key, None)
        self._told_to_go.pop(key, None)
        # The next service of this name may come at once.
        await self._look_for_gone(key, "", (), clock)
        if self._gone_at[key]:
            return _NAME_REST_S
        del self._gone_at[key]
        return None

    def note_cluster(self, key: ServiceKey, name: str) -> None:
        """A RayCluster of this name was made. It may be gone before it is seen, and its name rests all the same."""
        self._gone_at.setdefault(key, {}).setdefault(name, None)

    async def observe(
        self, key: ServiceKey, uid: str, remembered: Iterable[str], patience: timedelta, clock: datetime
    ) -> Observed:
        """What is there of the service with this uid; one of the same name that was deleted may have left RayClusters.

        `remembered` are the names of its groups in its status. A node that is not ready is given up after `patience`.
        """
        # Before anything is looked at: what is seen is to be of one moment.
        failures = await self.mount_failures(key, self._pods.of_service(key))
        await self._look_for_gone(key, uid, remembered, clock)
        everything = self._pods.of_service(key)
        pods = [each for each in everything if "deletionTimestamp" not in each["metadata"]]
        leaving = tuple(pod(each) for each in everything if "deletionTimestamp" in each["metadata"])
        num_new = self._count_new_pods(key, everything, clock)
        nodes = {each["spec"].get("nodeName", "") for each in everything} & self._nodes.unready.keys()
        told = {each.owner_uid for each in leaving if each.is_head and each.node not in nodes}
        told |= self._told_to_go.get(key, set())
        self._told_to_go[key] = told & {each["metadata"]["uid"] for each in self._clusters.of_service(key)}
        given_up_at = {node: self._nodes.unready[node] + patience for node in nodes}
        found = {uid for each in self._endpoints.of_service(key) for uid in each["uids"]}
        groups, targets, num_ending = [], {}, 0
        taken = {name for name, at in self._gone_at[key].items() if at is not None}
        for cluster in self._clusters.of_service(key):
            meta = cluster["metadata"]
            name = meta["name"]
            if not is_owned(meta, uid) or "deletionTimestamp" in meta:
                num_ending += is_owned(meta, uid)
                taken.add(name)
                continue
            # By uid: pods of a RayCluster that had this name before may be left.
            own = [each for each in pods if is_owned(each["metadata"], meta["uid"])]
            group = Group(
                name=name,
                revision=names.revision_of(name),
                uid=meta["uid"],
                pods=tuple(pod(each, failures.get(each["metadata"]["uid"], "")) for each in own),
                refusal=cluster_refusal(cluster),
                is_headless=is_headless(cluster),
                is_suspended=is_suspended(cluster),
                num_new_pods=num_new.get(meta["uid"], 0),
                reading=None,
                is_told_to_go=meta["uid"] in told,
            )
            stay = [each.stays_when_cordoned for each in group.pods if each.node in self._nodes.cordoned]
            is_found = group.head is not None and group.head.uid in found
            groups.append(replace(group, is_found=is_found, is_cordoned=False in stay, is_tolerant=True in stay))
            if group.head is not None and group.head.ip:
                token, old_token = self._admin_tokens(key[0], uid, name)
                num_ranks = cluster["numRanks"] or MAX_RANKS
                targets[name] = Target(
                    group.head.ip, token, group.head.uid, group.head.num_engine_starts, num_ranks, old_token
                )
        # Forgets what a head said that is another pod by now, so the readings come after it.
        self._poller.follow(key, targets)
        asked = (replace(group, reading=self._poller.reading(key, group.name)) for group in groups)
        return Observed(
            groups=tuple(asked),
            taken=frozenset(taken),
            num_ending=num_ending,
            leaving=leaving,
            lost_nodes=frozenset(node for node, at in given_up_at.items() if at <= clock),
            waits=tuple(at for at in given_up_at.values() if at > clock),
            knows_nodes=self._nodes.reflector.is_synced.is_set(),
        )

    async def _look_for_gone(self, key: ServiceKey, uid: str, remembered: Iterable[str], clock: datetime) -> None:
        """Notes which RayClusters went since the last look; at the first one, which that are remembered."""
        known = self._gone_at.setdefault(key, dict.fromkeys(remembered))
        # Pods may outlive a RayCluster that went before this operator came.
        labels = (each["metadata"]["labels"] for each in self._pods.of_service(key))
        known |= dict.fromkeys({each[names.GROUP_LABEL] for each in labels if names.GROUP_LABEL in each} - {*known})
        there: set[str] = set()
        # Until nothing went while it was asked.
        while missing := {name for name, at in known.items() if at is None} - self._names(key) - there:
            for name in missing:
                # A cluster whose label was taken away is there all the same, and gets it back under its name.
                if await self._is_there(key, name, uid):
                    there.add(name)
                else:
                    known[name] = clock
        for name in [name for name, at in known.items() if at and clock - at > timedelta(seconds=_NAME_REST_S)]:
            del known[name]
        known |= dict.fromkeys(self._names(key))

    def _names(self, key: ServiceKey) -> set[str]:
        return {each["metadata"]["name"] for each in self._clusters.of_service(key)}

    async def _is_there(self, key: ServiceKey, name: str, uid: str) -> bool:
        try:
            found = await self._kube.get(object_path("ray.io/v1", "RayCluster", key[0], name))
        except KubeError as error:
            return error.code != NOT_FOUND
        return is_owned(found["metadata"], uid) and "deletionTimestamp" not in found["metadata"]

    def _count_new_pods(self, key: ServiceKey, pods: list[Manifest], clock: datetime) -> dict[str, int]:
        """uid of a RayCluster -> pods made for it lately, also those that are gone. Forgotten by a restart."""
        known = self._new_pods.setdefault(key, {})
        for meta in (each["metadata"] for each in pods):
            owner = next((each["uid"] for each in meta.get("ownerReferences", ())), "")
            known.setdefault(meta["uid"], (owner, moment(meta.get("creationTimestamp", ""))))
        for uid in [uid for uid, (_, at) in known.items() if clock - at > timedelta(seconds=NEW_POD_S)]:
            del known[uid]
        return Counter(owner for owner, _ in known.values())

    async def mount_failures(self, key: ServiceKey, pods: Sequence[Manifest]) -> dict[str, str]:
        """uid of pods that wait for a volume of the user's -> what the kubelet says about it."""
        waiting = [
            each
            for each in pods
            if "deletionTimestamp" not in each["metadata"] and _user_volumes(each) and pod(each).is_mounting
        ]
        if not waiting:
            return {}
        said = await self._said(key, "Pod", "FailedMount")
        volumes = {f'"{name}"' for each in waiting for name in _user_volumes(each)}
        return {uid: words for uid, words in said if any(volume in words for volume in volumes)}

    async def found(self, key: ServiceKey) -> frozenset[str]:
        """The uids of the head pods that clients find, also where the watch has not told it yet."""
        selector = {"labelSelector": f"{names.SERVICE_LABEL}={key[1]}"}
        slices, _ = await self._kube.list(object_path("discovery.k8s.io/v1", "EndpointSlice", key[0]), selector)
        return frozenset(uid for each in slices for uid in shapes.endpoint_slice(each)["uids"])

    async def job_failures(self, key: ServiceKey) -> dict[str, str]:
        """uid of Jobs -> why they could get no pod."""
        return dict(await self._said(key, "Job", "FailedCreate"))

    async def _said(self, key: ServiceKey, kind: str, reason: str) -> list[tuple[str, str]]:
        """(uid, message) of the Events about objects of a kind; the newest comes last, and counts."""
        selector = {"fieldSelector": f"involvedObject.kind={kind},reason={reason}"}
        try:
            found, _ = await self._kube.list(object_path("v1", "Event", key[0]), selector)
        except OperatorError as error:
            logger.warning("%s/%s: the Events %s are not known: %s", *key, reason, error)
            return []
        found.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        return [(event["involvedObject"]["uid"], event.get("message", "")) for event in found]


def _user_volumes(pod_document: Manifest) -> list[str]:
    """Names of the pod's volumes for which the user has to provide something."""
    volumes = pod_document["spec"].get("volumes", ())
    return [volume["name"] for volume in volumes if volume["name"] not in names.MADE_VOLUMES]
