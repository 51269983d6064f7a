"""The changes that one reconcile makes to the cluster, so that it matches the spec of a service. Pure.

`decide.rollout` chooses how many engine replicas each revision has, and which replicas are terminated.
`decide.recovery` finds the replicas that have failed. The RayCluster and the pods of an existing engine replica are
never changed, except for the head pod's route label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from rayloom_operator.api.spec import API_VERSION, KIND, LLMService
from rayloom_operator.decide.adapters import AdapterListRequest, adapter_list_requests
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.gateway import (
    gateway_deletions,
    gateway_objects,
    gateway_route,
    renewed_secrets,
)
from rayloom_operator.decide.changes.pod_label import PodLabel
from rayloom_operator.decide.changes.routes import Route, route_changes
from rayloom_operator.decide.recovery import Place
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.settings import Settings
from rayloom_operator.decide.situation import Situation
from rayloom_operator.names import Manifest, admin_secret_name, object_path
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.old_spec import old_spec, old_spec_name, old_spec_path
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.observed import EngineReplica
from rayloom_operator.resolve.resolved import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A request to an engine: accept no more requests, or accept requests again."""

    replica: str  # name of the engine replica
    ip: str
    token: str  # token of the engine's admin port
    wanted: bool  # True: accept no more requests
    old_token: str = ""  # derived from the operator's previous key; empty if the key was never changed


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWrite:
    """A new number of engine replicas, which the scaler writes into the LLMService."""

    path: str  # path of the LLMService
    uid: str
    generation: int  # metadata.generation of the LLMService from which the number was computed
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to make. Their order is: `drains` that end a drain, `routes`, `wanted`, `labels`, `adapters`,
    `drains` that begin a drain, `deletions`.
    """

    wanted: tuple[Manifest, ...] = ()  # objects to create, or to apply
    # Names of engine replicas, and of a stored spec, that are created for the first time. If a ConfigMap, Secret or
    # ControllerRevision of such a name exists already, it was not created for this service.
    new: frozenset[str] = frozenset()
    deletions: tuple[Deletion, ...] = ()
    routes: tuple[Route, ...] = ()
    labels: tuple[PodLabel, ...] = ()
    drains: tuple[Drain, ...] = ()
    adapters: tuple[AdapterListRequest, ...] = ()
    waits: tuple[datetime, ...] = ()  # times at which failed replicas may be recreated
    scale: ScaleWrite | None = None  # written after all other changes


def plan(situation: Situation) -> Plan:
    """Returns the changes to make now.

    While no replica can be created, existing replicas stay. During this time, replicas that serve keep their route,
    other replicas lose their route, and the PodDisruptionBudget allows every eviction.
    """
    resolved, step = situation.resolved, situation.step
    routes = route_changes(situation)
    stranded = tuple(_stranded_pods(situation))
    if resolved is None or step is None or not situation.can_create:
        return Plan(wanted=_of_running_engines(situation), routes=routes, deletions=stranded)
    replicas = _replicas(situation, resolved)
    update = step.state.update_revision
    stored_spec = old_spec_name(resolved.service.metadata.name, update)
    is_new_revision = situation.rollout.update_revision != update
    return Plan(
        wanted=(*_shared_objects(situation, resolved, step), *replicas.wanted),
        new=frozenset((*replicas.new, stored_spec) if is_new_revision else replicas.new),
        deletions=(
            *_deletions(situation, resolved, step),
            *_unused_specs(situation, resolved, step),
            *gateway_deletions(situation, resolved),
            *gateway_route(situation, resolved).deletions(),
            *stranded,
        ),
        routes=routes,
        drains=tuple(_drains(situation, resolved, step)),
        adapters=tuple(adapter_list_requests(situation)),
        waits=tuple(replicas.waits),
        scale=_scale(situation, resolved),
    )


def _scale(situation: Situation, resolved: Resolved) -> ScaleWrite | None:
    if situation.scaling is None or situation.scaling.write is None:
        return None
    meta = resolved.service.metadata
    return ScaleWrite(
        path=object_path(API_VERSION, KIND, meta.namespace, meta.name),
        uid=meta.uid,
        generation=situation.generation,
        after=situation.scaling.write,
    )


def _of_running_engines(situation: Situation) -> tuple[Manifest, ...]:
    """Returns the objects that engines need while the spec cannot be used.

    The disruption budget allows every eviction: waiting for a replacement would be of no use, because no replica can be
    created.
    """
    service = situation.service
    if service is None or not situation.observed.replicas:
        return ()
    return (disruption_budget(service), *renewed_secrets(situation, service))


def _shared_objects(situation: Situation, resolved: Resolved, step: Step) -> tuple[Manifest, ...]:
    """Returns the objects that all engine replicas of the service share."""
    service = resolved.service
    return (
        service_account(service),
        client_service(service),
        disruption_budget(service, _num_pods(situation, resolved, step) if step.holds_evictions else 0),
        network_policy(service, situation.settings.namespace),
        old_spec(resolved, step.state.update_revision, situation.inspection.model),
        *gateway_objects(situation, resolved),
    )


def _num_pods(situation: Situation, resolved: Resolved, step: Step) -> int:
    """Returns the largest number of pods to protect from eviction, now or once all wanted replicas exist."""
    observed = situation.observed
    num_coming = len(observed.replicas) + observed.num_ending + sum(step.make.values())
    num_replicas = max(resolved.service.spec.replicas, num_coming)
    specs = [resolved, *(each.resolved for each in situation.revisions if each.resolved is not None)]
    largest = max(1 + each.num_pods for each in specs)
    most_seen = max((len(each.pods) for each in observed.replicas), default=0)
    return (num_replicas - step.num_evictable) * max(largest, most_seen)


@dataclass(slots=True)
class _Replicas:
    """The objects of engine replicas that are created or applied."""

    wanted: list[Manifest] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    waits: list[datetime] = field(default_factory=list)


def _replicas(situation: Situation, resolved: Resolved) -> _Replicas:
    found = _Replicas()
    for revision in situation.revisions:
        num_left = revision.num_new
        for place in revision.places:
            waits = _waits(place, situation, resolved)
            found.waits += waits
            is_empty = place.replica is None
            if revision.resolved is None or place.has_failed:
                continue
            if is_empty and (waits or num_left <= 0):
                continue
            made_from = revision.resolved
            found.wanted += _objects_of(place, revision.revision, made_from, resolved.service, situation.settings)
            if is_empty:
                num_left -= 1
                found.new.append(place.name)
    return found


def _waits(place: Place, situation: Situation, resolved: Resolved) -> list[datetime]:
    """Returns times before which no replica may be created in the place; empty if a replica may be created now."""
    now = situation.now.wall
    found: list[datetime] = []
    if place.failure is None:
        return found
    retry_at = place.retry_at(resolved.service.spec.recovery)
    if place.replica is None and retry_at is not None and retry_at > now:
        found.append(retry_at)
    if place.name not in situation.memory:
        # The status does not have the failure under the new replica's name yet. If the operator created the replica now
        # and stopped afterwards, the failure would be lost.
        found.append(now)
    return found


def _objects_of(
    place: Place, revision: str, made_from: Resolved, service: LLMService, settings: Settings
) -> Iterator[Manifest]:
    """Yields the objects of one engine replica. An existing RayCluster is never applied again, because another version
    of the operator may have built it differently."""
    number = int(place.name.rpartition("-")[2])
    made_from = replace(made_from, has_tls=settings.pod_tls != "off")
    yield config_map(made_from, revision, number)
    yield admin_secret(service, revision, settings.operator_key, number)
    if place.replica is None:
        yield ray_cluster(made_from, revision, number, service.metadata)


def _deletions(situation: Situation, resolved: Resolved, step: Step) -> Iterator[Deletion]:
    namespace = resolved.service.metadata.namespace
    for replica in situation.observed.replicas:
        if replica.name in step.delete:
            yield from replica_deletions(replica, namespace)
    # If a replica's RayCluster is gone, its place has a new name. The other objects with the old name are deleted here.
    places = situation.places
    gone = (
        situation.memory.keys() - {each.name for each in places} - {each.name for each in situation.observed.replicas}
    )
    for name in sorted(gone):
        yield from _own_objects(name, namespace)
    for place in places:
        if place.has_failed and place.replica is not None:
            yield _cluster_deletion(place.replica, namespace)


def _unused_specs(situation: Situation, resolved: Resolved, step: Step) -> Iterator[Deletion]:
    """Yields the deletions of stored specs that the stored state of the rollout does not need.

    The state that this reconcile computes does not count: if it is not written, the next reconcile starts from the
    stored state again, and may have to roll back. A revision stays if the spec asks for it again.
    """
    meta = resolved.service.metadata
    for revision in situation.rollout.retired:
        if revision not in step.state.revisions:
            yield Deletion(old_spec_path(meta.namespace, meta.name, revision))


def replica_deletions(replica: EngineReplica, namespace: str) -> tuple[Deletion, ...]:
    """Returns the deletions of an engine replica and of its own objects.

    The RayCluster comes last: as long as it exists, a restarted operator repeats the deletion of the other objects.
    """
    return (*_own_objects(replica.name, namespace), _cluster_deletion(replica, namespace))


def _own_objects(replica: str, namespace: str) -> tuple[Deletion, ...]:
    # The operator cannot read Secrets. Only the replica's ConfigMap shows to which service the replica's Secret
    # belongs. So the ConfigMap stays until the Secret is deleted.
    return (
        Deletion(object_path("v1", "Secret", namespace, admin_secret_name(replica))),
        Deletion(object_path("v1", "ConfigMap", namespace, replica)),
    )


def _cluster_deletion(replica: EngineReplica, namespace: str) -> Deletion:
    # A deletion in the foreground: the RayCluster stays listed until its pods have left their nodes.
    return Deletion(object_path("ray.io/v1", "RayCluster", namespace, replica.name), replica.uid, is_foreground=True)


def _stranded_pods(situation: Situation) -> Iterator[Deletion]:
    """Yields deletions of pods that would stay too long.

    These are pods on lost nodes, and terminating pods of failed engines. Such a terminating pod would otherwise wait
    for requests to finish.
    """
    observed = situation.observed
    failed = {place.failure.uid for place in situation.places if place.failure is not None}
    staying = [pod for replica in observed.replicas if replica.uid not in failed for pod in replica.pods]
    for pod in (*staying, *observed.terminating_pods):
        grace_s = None
        if pod.node in observed.lost_nodes:
            grace_s = 0
        elif pod.owner_uid in failed and (pod.grace_s or 0) > 1:
            grace_s = 1
        if grace_s is not None:
            yield Deletion(object_path("v1", "Pod", pod.namespace, pod.name), pod.uid, grace_s)


def _drains(situation: Situation, resolved: Resolved, step: Step) -> Iterator[Drain]:
    meta = resolved.service.metadata
    for replica in situation.observed.replicas:
        head = replica.head
        if head is None or not head.ip or replica.name not in (*step.undrain, *step.drain):
            continue
        token, old_token = situation.settings.admin_tokens(meta.namespace, meta.uid, replica.name)
        yield Drain(
            replica=replica.name, ip=head.ip, token=token, old_token=old_token, wanted=replica.name in step.drain
        )
