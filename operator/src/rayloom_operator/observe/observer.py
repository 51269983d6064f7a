"""Observes a service: from the documents in the caches of the watches, and the last answers of the engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import NODE_TYPE_LABEL, SERVICE_LABEL, Manifest, ServiceKey, gateway_name, object_path
from rayloom_operator.objects.llmgateway.identity import object_name
from rayloom_operator.objects.ownership import owner_uid
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.failure_events import FailureEvents
from rayloom_operator.observe.observed import NEW_POD_S, EngineReplica, Observed, Pod, ServingGateway
from rayloom_operator.observe.poller import EnginePoller, Target
from rayloom_operator.observe.replicas import Documents, group
from rayloom_operator.observe.resting_names import RestingNames
from rayloom_operator.observe.watches import Watches
from rayloom_operator.times import moment

# (namespace, uid of the service, name of an engine replica) -> the tokens of the replica's admin port, derived from the
# operator's current and from its previous key.
AdminTokens = Callable[[str, str, str], tuple[str, str]]


class Observer:
    """Returns the observations of a service at one moment. Not thread-safe: used in one event loop."""

    def __init__(
        self,
        kube: Kube,
        watches: Watches,
        poller: EnginePoller,
        admin_tokens: AdminTokens,
        drift: Drift,
    ) -> None:
        self._kube = kube
        self._drift = drift
        self._watches = watches
        self._poller = poller
        self._admin_tokens = admin_tokens
        self.events = FailureEvents(kube)
        self._names = RestingNames(kube, watches.clusters, watches.pods)
        # uid of a pod -> (uid of its RayCluster, time at which the pod was created)
        self._new_pods: dict[ServiceKey, dict[str, tuple[str, datetime]]] = {}
        self._evicted: dict[ServiceKey, frozenset[str]] = {}  # uids of RayClusters whose head pods were evicted

    async def forget(self, key: ServiceKey, now: datetime) -> float | None:
        """Drops everything about a deleted service.

        Returns the seconds until `forget` has to be called again, or None once nothing is left. Until the last call the
        names of the service's RayClusters stay reserved, because a service of the same name may be created at once.
        """
        self._poller.follow(key, {})
        self._new_pods.pop(key, None)
        self._evicted.pop(key, None)
        return await self._names.forget(key, now)

    def note_cluster(self, key: ServiceKey, name: str) -> None:
        """Notes that a RayCluster of this name was created."""
        self._names.note(key, name)

    async def observe(
        self,
        key: ServiceKey,
        uid: str,
        remembered: Iterable[str],
        node_loss: timedelta,
        now: datetime,
        *,
        polls_gateways: bool = False,
    ) -> Observed:
        """Returns the observations of the service with this uid.

        RayClusters that belong to another uid are left over from a deleted service of the same name. `remembered`: the
        names of RayClusters in the service's status. `node_loss`: a node that has not been ready for this long counts
        as lost. `polls_gateways`: the /status of gateway pods is polled, too, and LLMGateways are observed.
        """
        # The requests to the API server come first. Nothing is awaited after them, so all documents are of one moment.
        mount_failures = await self.events.mount_failures(key, self._watches.pods.of_service(key))
        await self._names.find_gone(key, uid, remembered, now)
        documents = self._documents(key, uid, mount_failures, now)
        grouped = group(documents)
        # The readings are read after the call of `follow`, because `follow` drops the answers of replaced head pods.
        llmgateways = self._watches.llmgateways_of(key) if polls_gateways else ()
        gateways = self._gateway_targets(key, uid, grouped.gateways, llmgateways or ()) if polls_gateways else {}
        self._poller.follow(key, self._targets(key, uid, grouped.replicas) | gateways)
        given_up_at = self._given_up_at(documents.pods, node_loss)
        return Observed(
            replicas=tuple(replace(each, reading=self._poller.reading(key, each.name)) for each in grouped.replicas),
            gateways=grouped.gateways,
            gateway_progress=self._drift.deployments.of(key, gateway_name(key[1])),
            routes=self._drift.routes.of(key, gateway_name(key[1])),
            unknown_kinds=self._drift.unknown_kinds(),
            llmgateways=llmgateways,
            gateway_readings={
                name: reading for name in gateways if (reading := self._poller.reading(key, name)) is not None
            },
            taken=grouped.taken | self._names.resting(key),
            num_ending=grouped.num_ending,
            terminating_pods=grouped.terminating_pods,
            lost_nodes=frozenset(node for node, at in given_up_at.items() if at <= now),
            waits=tuple(at for at in given_up_at.values() if at > now),
            knows_nodes=self._watches.nodes.reflector.is_synced.is_set(),
        )

    async def found(self, key: ServiceKey) -> frozenset[str]:
        """Returns the uids of head pods listed in the Service's EndpointSlices.

        Lists the EndpointSlices at the API server, because watches may lag.
        """
        selector = {"labelSelector": f"{SERVICE_LABEL}={key[1]}"}
        slices, _ = await self._kube.list(object_path("discovery.k8s.io/v1", "EndpointSlice", key[0]), selector)
        return frozenset(uid for each in slices for uid in shapes.endpoint_slice(each)["uids"])

    def _documents(self, key: ServiceKey, uid: str, mount_failures: dict[str, str], now: datetime) -> Documents:
        watches = self._watches
        clusters, pods = watches.clusters.of_service(key), watches.pods.of_service(key)
        return Documents(
            service_uid=uid,
            clusters=clusters,
            pods=pods,
            slices=watches.endpoints.of_service(key),
            cordoned=watches.nodes.cordoned,
            mount_failures=mount_failures,
            num_new_pods=self._count_new_pods(key, pods, now),
            evicted=self._note_evicted(key, clusters, pods),
        )

    def _targets(self, key: ServiceKey, uid: str, replicas: Sequence[EngineReplica]) -> dict[str, Target]:
        """Returns name of a replica -> address of its engine. Replicas whose head pod has no IP are left out."""
        found = {}
        for replica in replicas:
            head = replica.head
            if head is None or not head.ip:
                continue
            token, old_token = self._admin_tokens(key[0], uid, replica.name)
            found[replica.name] = Target(
                ip=head.ip,
                token=token,
                pod_uid=head.uid,
                num_starts=head.num_engine_starts,
                max_ranks=replica.num_ranks,
                old_token=old_token,
            )
        return found

    def _gateway_targets(
        self, key: ServiceKey, uid: str, own: Sequence[Pod], llmgateways: Sequence[ServingGateway]
    ) -> dict[str, Target]:
        """Returns name of a gateway pod -> its address. All pods of a Deployment share one token."""
        deployments = [(uid, gateway_name(key[1]), own, "")]
        deployments += [(each.uid, object_name(each.name), each.pods, each.model) for each in llmgateways]
        found: dict[str, Target] = {}
        for owner, deployment, pods, model in deployments:
            token, old_token = self._admin_tokens(key[0], owner, deployment)
            found |= {
                each.name: Target(
                    ip=each.ip, token=token, pod_uid=each.uid, old_token=old_token, is_gateway=True, model=model
                )
                for each in pods
                if each.ip
            }
        return found

    def _given_up_at(self, pods: Sequence[Manifest], node_loss: timedelta) -> dict[str, datetime]:
        """Returns unready nodes of these pods: name of the node -> time from which the node counts as lost."""
        nodes = self._watches.nodes
        names = {each["spec"].get("nodeName", "") for each in pods} & nodes.unready.keys()
        return {name: at for name in names if (at := nodes.lost_at(name, node_loss)) is not None}

    def _count_new_pods(self, key: ServiceKey, pods: Sequence[Manifest], now: datetime) -> dict[str, int]:
        """Returns uid of a RayCluster -> number of its pods that were created within the last NEW_POD_S seconds.

        Deleted pods count as well, except those that were deleted before this operator process started.
        """
        known = self._new_pods.setdefault(key, {})
        for meta in (each["metadata"] for each in pods):
            known.setdefault(meta["uid"], (owner_uid(meta), moment(meta.get("creationTimestamp", ""))))
        for uid, (_, at) in list(known.items()):
            if now - at > timedelta(seconds=NEW_POD_S):
                del known[uid]
        return Counter(owner for owner, _ in known.values())

    def _note_evicted(self, key: ServiceKey, clusters: Sequence[Manifest], pods: Sequence[Manifest]) -> frozenset[str]:
        """Returns the uids of existing RayClusters whose head pods were deleted or evicted by another client.

        A head pod on a node that is not ready does not count: it is deleted because the node is lost.
        """
        unready = self._watches.nodes.unready
        evicted = {
            owner_uid(each["metadata"])
            for each in pods
            if "deletionTimestamp" in each["metadata"]
            and each["metadata"].get("labels", {}).get(NODE_TYPE_LABEL) == "head"
            and each["spec"].get("nodeName", "") not in unready
        }
        evicted |= self._evicted.pop(key, frozenset())
        found = frozenset(evicted & {each["metadata"]["uid"] for each in clusters})
        if found:
            self._evicted[key] = found
        return found
