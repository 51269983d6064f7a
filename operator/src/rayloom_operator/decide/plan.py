"""What to change in the cluster so that it becomes what a service asks for. Pure.

How many engines of which revision there are to be, and which of them go, is `rollout`'s to say; which of them are
beyond help is `recovery`'s. Nothing of a running group is ever changed but its route label.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from datetime import datetime

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.api.spec import LLMService
from rayloom_operator.api.status import Model
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.recovery import Memory, Slot
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.rollout.revisions import Lineage
from rayloom_operator.names import Manifest, admin_secret_name, object_path
from rayloom_operator.objects.companions import (
    admin_secret,
    admin_token,
    client_service,
    config_map,
    service_account,
)
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.old_spec import old_spec, old_spec_name, old_spec_path
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.observed import Group, Observed, Pod
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.resolved import Hub, Resolved
from rayloom_operator.times import Now

# States in which an engine takes requests; while it recovers they wait in it.
_TAKES_REQUESTS = ("serving", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator was started with."""

    engine_image: str  # of engines whose service names none
    operator_key: bytes  # admin tokens are derived from it
    previous_key: bytes = b""  # those of engines that were made before the key was changed; empty where it never was
    namespace: str = ""  # of the operator's own pods; empty where it is in none
    hub: Hub = field(default_factory=Hub)
    permissions: Permissions = field(default_factory=Permissions)

    def admin_tokens(self, namespace: str, service_uid: str, group: str) -> tuple[str, str]:
        """That of the group's admin port, and of one that was made before the key was changed; empty for no such."""
        token = admin_token(self.operator_key, namespace, service_uid, group)
        old = admin_token(self.previous_key, namespace, service_uid, group) if self.previous_key else ""
        return token, old

    def image(self, service: LLMService) -> str:
        """The image of the engine's pods."""
        return service.spec.engine.image or self.engine_image


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object to delete. The uid, where known, keeps a later object of the same name safe."""

    path: str
    uid: str = ""
    grace_s: int | None = None  # None: as the object itself says
    is_foreground: bool = False  # it stays, marked as deleted, until what it owns is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A head pod that begins or ceases to take requests of the service."""

    pod: Pod
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """An engine that is to take no more requests, or is to take them again."""

    group: str
    ip: str
    token: str  # of its admin port
    wanted: bool
    old_token: str = ""  # of one that was made before the operator's key was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In this order: `drains` taken back, `routes`, `wanted`, new `drains`, `deletions`."""

    wanted: tuple[Manifest, ...] = ()
    # Names of groups whose ConfigMap and Secret, where there are any, are another's remains; and of an old spec that no
    # earlier pass has made.
    new: frozenset[str] = frozenset()
    deletions: tuple[Deletion, ...] = ()
    routes: tuple[Route, ...] = ()
    drains: tuple[Drain, ...] = ()
    waits: tuple[datetime, ...] = ()  # when a group that failed may be made anew


def plan(
    resolved: Resolved | None,
    seen: Observed,
    lineages: tuple[Lineage, ...],
    step: Step | None,
    memory: Memory,
    rollout: RolloutState,
    settings: Settings,
    service: LLMService | None = None,
    model: Model | None = None,
    *,
    now: Now,
) -> Plan:
    """What to do now. `resolved` and `step` are None while the spec cannot be used: then what runs goes on as it is.

    `memory` and `rollout` are what was written of engines and rolls, `service` is the spec as far as it can be read,
    `model` is what was found of its model. An engine that failed is made anew when its time has come.
    """
    going = rollout.leaving.keys() | (step.state.leaving.keys() if step is not None else set())
    wells = {group.name for group in seen.groups if is_well(group, now.mono)}
    slots = tuple(slot for lineage in lineages for slot in lineage.slots)
    routes = tuple(route for group in seen.groups if (route := _route(group, seen, wells, going, step)))
    if resolved is None or step is None:
        # Nothing is moved now, so nothing is to be waited for.
        freed = (disruption_budget(service),) if service is not None and seen.groups else ()
        return Plan(wanted=freed, routes=routes, deletions=tuple(_stranded(seen, slots)))
    service, update = resolved.service, step.state.update_revision
    budget = disruption_budget(service, _num_pods(resolved, lineages, seen, step) if step.holds_evictions else 0)
    wanted = [service_account(service), client_service(service), budget]
    wanted.append(network_policy(service, settings.namespace))
    wanted.append(old_spec(resolved, update, model))
    is_new = rollout.update_revision != update
    new, waits = {old_spec_name(service.metadata.name, update)} if is_new else set(), []
    for lineage in lineages:
        num_left = lineage.num_new
        for slot in lineage.slots:
            retry_at = slot.retry_at(service.spec.recovery)
            if slot.group is None and retry_at is not None and retry_at > now.wall:
                waits.append(retry_at)
            is_written = slot.name in memory or slot.failure is None
            if not is_written:
                waits.append(now.wall)  # Made under a name that nobody remembers, it would have a clean record.
            if slot.is_condemned or (slot.group is None and (retry_at in waits or not is_written)):
                continue
            if lineage.resolved is None or (slot.group is None and num_left <= 0):
                continue
            number = int(slot.name.rpartition("-")[2])
            # What a group is made of is never changed, also by an operator of another version that would build it
            # otherwise.
            wanted.append(config_map(lineage.resolved, lineage.revision, number))
            wanted.append(admin_secret(service, lineage.revision, settings.operator_key, number))
            if slot.group is None:
                num_left -= 1
                new.add(slot.name)
                wanted.append(ray_cluster(lineage.resolved, lineage.revision, number, service.metadata))
    namespace = service.metadata.namespace
    deletions = [
        deletion for group in seen.groups if group.name in step.delete for deletion in group_deletions(group, namespace)
    ]
    # Of groups that went, and whose places have other names now.
    left = memory.keys() - {slot.name for slot in slots} - {group.name for group in seen.groups}
    deletions += [deletion for name in sorted(left) for deletion in _companions(name, namespace)]
    deletions += [_end(slot.group, namespace) for slot in slots if slot.is_condemned and slot.group is not None]
    forgotten = sorted(_revisions(rollout) - _revisions(step.state))
    deletions += [Deletion(old_spec_path(namespace, service.metadata.name, each)) for each in forgotten]
    return Plan(
        wanted=tuple(wanted),
        new=frozenset(new),
        deletions=(*deletions, *_stranded(seen, slots)),
        # First on, then off, so that the service is never without an engine for it.
        routes=tuple(sorted(routes, key=lambda route: not route.wanted)),
        drains=tuple(_drains(service, seen, step, settings)),
        waits=tuple(waits),
    )


def _num_pods(resolved: Resolved, lineages: tuple[Lineage, ...], seen: Observed, step: Step) -> int:
    """No fewer than the service's engines have after this step, and as many as those that are to serve."""
    num_engines = max(resolved.service.spec.replicas, len(seen.groups) + seen.num_ending + sum(step.make.values()))
    sizes = [1 + each.num_pods for each in (resolved, *(lineage.resolved for lineage in lineages)) if each is not None]
    return (num_engines - step.num_freed) * max(*sizes, *(len(group.pods) for group in seen.groups), 0)


def _revisions(state: RolloutState) -> set[str]:
    return {state.current_revision, state.update_revision, *state.counts} - {""}


def _drains(service: LLMService, seen: Observed, step: Step, settings: Settings) -> Iterator[Drain]:
    meta = service.metadata
    for group in seen.groups:
        if group.head is not None and group.head.ip and group.name in (*step.undrain, *step.drain):
            token, old = settings.admin_tokens(meta.namespace, meta.uid, group.name)
            wanted = group.name in step.drain
            yield Drain(group=group.name, ip=group.head.ip, token=token, old_token=old, wanted=wanted)


def group_deletions(group: Group, namespace: str) -> tuple[Deletion, ...]:
    """A group, and what it has of its own."""
    # The RayCluster goes last: while it is listed, whoever was interrupted here knows what is left to do.
    return (*_companions(group.name, namespace), _end(group, namespace))


def _companions(group: str, namespace: str) -> tuple[Deletion, ...]:
    # The Secret first: while it is there, the ConfigMap says whose it is.
    return (
        Deletion(object_path("v1", "Secret", namespace, admin_secret_name(group))),
        Deletion(object_path("v1", "ConfigMap", namespace, group)),
    )


def _end(group: Group, namespace: str) -> Deletion:
    # In the foreground, so that it is seen for as long as it holds its nodes.
    return Deletion(object_path("ray.io/v1", "RayCluster", namespace, group.name), group.uid, is_foreground=True)


def _stranded(seen: Observed, slots: tuple[Slot, ...]) -> Iterator[Deletion]:
    """Pods that would stay for long: their node is lost, or they drain although their engine is beyond help."""
    failed = {slot.failure.uid for slot in slots if slot.failure is not None}
    staying = [pod for group in seen.groups if group.uid not in failed for pod in group.pods]
    for pod in (*staying, *seen.leaving):
        grace_s = None
        if pod.node in seen.lost_nodes:
            grace_s = 0
        elif pod.owner_uid in failed and (pod.grace_s or 0) > 1:
            grace_s = 1
        if grace_s is not None:
            yield Deletion(object_path("v1", "Pod", pod.namespace, pod.name), pod.uid, grace_s)


def _route(group: Group, seen: Observed, wells: set[str], going: Set[str], step: Step | None) -> Route | None:
    """The change that the head's route label needs; None when it is right, or while nobody knows.

    While others of the `wells` take requests, or will with this step, a group that recovers or does not answer gets
    none; the last one keeps its own, for they wait in it. Those that are `going` are the roll's.
    """
    head = group.head
    said = group.reading.status if group.reading is not None else None
    if head is not None and step is not None and group.name in step.route_off:
        return Route(pod=head, wanted=False)
    if head is None or group.name in going or (head.is_engine_ready and said is None):
        return None
    wanted = head.is_engine_ready and said is not None and said.state in _TAKES_REQUESTS
    if group.name in wells:
        # The first engine of a revision that has failed gets none, although it is well.
        wanted = wanted and (head.is_routed or step is None or group.name in step.route_on)
    else:
        others = [each for each in seen.groups if each.name in wells - going and each.head is not None]
        on = step.route_on if step is not None else wells
        wanted = wanted and not any(each.name in on or (each.head and each.head.is_routed) for each in others)
    return None if wanted == head.is_routed else Route(pod=head, wanted=wanted)
