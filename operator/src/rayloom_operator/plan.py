"""What to change in the cluster so that it becomes what a service asks for. Pure.

When the spec changes, groups of the new revision are made and those of the old one are deleted in the same pass: the
service is away while the new engines start. Nothing of a running group is ever changed but its route label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from rayloom_operator.api import LLMService
from rayloom_operator.judgement import is_well
from rayloom_operator.names import Manifest, admin_secret_name, object_path
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observed import Group, Observed, Pod
from rayloom_operator.recovery import Memory, Slot, remembered_names
from rayloom_operator.resolved import Hub, Resolved

# States in which an engine takes requests; while it recovers they wait in it.
_TAKES_REQUESTS = ("serving", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator was started with."""

    engine_image: str  # of engines whose service names none
    operator_key: bytes  # admin tokens are derived from it
    hub: Hub = field(default_factory=Hub)

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
    needs_successor: bool = False  # it waits until all that is wanted was accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A head pod that begins or ceases to take requests of the service."""

    pod: Pod
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In this order: `routes`, `wanted`, `deletions`. An engine of another revision goes only when its successor was
    accepted; whatever else is to go goes in any case."""

    wanted: tuple[Manifest, ...] = ()
    new: frozenset[str] = frozenset()  # groups whose ConfigMap and Secret, where there are any, are another's remains
    deletions: tuple[Deletion, ...] = ()
    routes: tuple[Route, ...] = ()
    waits: tuple[datetime, ...] = ()  # when a group that failed may be made anew


def plan(
    resolved: Resolved | None,
    seen: Observed,
    slots: tuple[Slot, ...],
    current: str,
    memory: Memory,
    operator_key: bytes,
    *,
    now: float,
    clock: datetime,
) -> Plan:
    """What to do now. `resolved` is None while the spec cannot be used: then what runs goes on as it is.

    `slots` are the places for engines of the revision `current`, `memory` is what was written of them. One that failed
    is made anew when its time has come, and until then no group of another revision goes.
    """
    wells = {group.name for group in seen.groups if is_well(group, now)}
    if resolved is None:
        kept = tuple(route for group in seen.groups if (route := _route(group, wells)))
        return Plan(routes=kept, deletions=tuple(_stranded(seen, slots)))
    service = resolved.service
    wanted = [service_account(service), client_service(service), disruption_budget(service), network_policy(service)]
    new, waits = set(), []
    for slot in slots:
        retry_at = slot.retry_at(service.spec.recovery)
        if slot.group is None and retry_at is not None and retry_at > clock:
            waits.append(retry_at)
        is_written = slot.name in memory or slot.failure is None
        if not is_written:
            waits.append(clock)  # Made under a name that nobody remembers, it would have a clean record.
        if slot.is_condemned or (slot.group is None and (retry_at in waits or not is_written)):
            continue
        number = int(slot.name.rpartition("-")[2])
        # What a group is made of is never changed, also by an operator of another version that would build it
        # otherwise.
        wanted += [config_map(resolved, current, number), admin_secret(service, current, operator_key, number)]
        if slot.group is None:
            new.add(slot.name)
            wanted.append(ray_cluster(resolved, current, number))
    is_whole = all(slot.group is not None or slot.name in new for slot in slots)
    places = {slot.name for slot in slots}
    surplus = {group.name for group in seen.groups if group.revision == current and group.name not in places}
    others = [group for group in seen.groups if group.name in surplus or (group.revision != current and is_whole)]
    namespace = service.metadata.namespace
    deletions = [
        replace(deletion, needs_successor=group.revision != current)
        for group in others
        # The RayCluster goes last: while it is listed, whoever was interrupted here knows what is left to do.
        for deletion in (*_companions(group.name, namespace), _end(group, namespace))
    ]
    # Of groups that went, and whose places have other names now.
    left = remembered_names(resolved, current, memory) - places - {group.name for group in seen.groups}
    deletions += [deletion for name in sorted(left) for deletion in _companions(name, namespace)]
    deletions += [_end(slot.group, namespace) for slot in slots if slot.is_condemned and slot.group is not None]
    routes = [route for group in seen.groups if (route := _route(group, wells - surplus, group.name in surplus))]
    return Plan(
        wanted=tuple(wanted),
        new=frozenset(new),
        deletions=(*deletions, *_stranded(seen, slots)),
        # First on, then off, so that the service is never without an engine for it.
        routes=tuple(sorted(routes, key=lambda route: not route.wanted)),
        waits=tuple(waits),
    )


def _companions(group: str, namespace: str) -> tuple[Deletion, ...]:
    return (
        Deletion(object_path("v1", "ConfigMap", namespace, group)),
        Deletion(object_path("v1", "Secret", namespace, admin_secret_name(group))),
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


def _route(group: Group, wells: set[str], is_surplus: bool = False) -> Route | None:
    """The change that the head's route label needs; None when it is right, or while nobody knows.

    `wells` names the groups that could take all requests. While there are others of them, a group that recovers, does
    not answer or is to go gets none; the last one keeps its own, for they wait in it.
    """
    head = group.head
    said = group.reading.status if group.reading is not None else None
    if head is None or (head.is_engine_ready and said is None):
        return None
    wanted = head.is_engine_ready and said is not None and said.state in _TAKES_REQUESTS
    if wells - {group.name} and (is_surplus or group.name not in wells):
        wanted = False
    return None if wanted == head.is_routed else Route(pod=head, wanted=wanted)
