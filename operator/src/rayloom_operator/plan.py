"""What to change in the cluster so that it becomes what a service asks for. Pure.

A service has one group today. When its spec changes, a group of the new revision is made and that of the old one is
deleted in the same pass: the service is away while the new engine starts. Nothing of a running group is ever changed
but its route label.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest, admin_secret_name, group_name, object_path
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observed import Group, Pod
from rayloom_operator.resolved import Hub, Resolved
from rayloom_operator.revision import revision

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A head pod that begins or ceases to take requests of the service."""

    pod: Pod
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In this order: `routes`, `wanted`, `deletions`. So an old engine goes only when its successor was accepted."""

    wanted: tuple[Manifest, ...] = ()
    is_new: bool = False  # the group's ConfigMap and Secret, where there are any, are remains of another
    deletions: tuple[Deletion, ...] = ()
    routes: tuple[Route, ...] = ()


def plan(
    resolved: Resolved | None, groups: tuple[Group, ...], operator_key: bytes, taken: frozenset[str] = frozenset()
) -> Plan:
    """What to do now. `resolved` is None while the spec cannot be used: then what runs goes on as it is.

    `taken` names RayClusters that are on their way out, or of a deleted service of the same name. One that is needed
    is made when the old one is gone, and until then nothing else goes.
    """
    routes = tuple(route for group in groups if (route := _route(group)))
    if resolved is None:
        return Plan(routes=routes)
    service, current = resolved.service, revision(resolved)
    name = group_name(service.metadata.name, current)
    lasting = (service_account(service), client_service(service))
    if name in taken:
        return Plan(wanted=lasting, routes=routes)
    # What a group is made of is never changed, also by an operator of another version that would build it otherwise.
    parts = (config_map(resolved, current), admin_secret(service, current, operator_key))
    is_new = all(group.name != name for group in groups)
    others = [(group, group.name, service.metadata.namespace) for group in groups if group.name != name]
    return Plan(
        wanted=lasting + parts + ((ray_cluster(resolved, current),) if is_new else ()),
        is_new=is_new,
        # The RayCluster goes last: while it is listed, whoever was interrupted here knows what is left to do.
        deletions=tuple(
            deletion
            for group, old, namespace in others
            for deletion in (
                Deletion(object_path("v1", "ConfigMap", namespace, old)),
                Deletion(object_path("v1", "Secret", namespace, admin_secret_name(old))),
                Deletion(object_path("ray.io/v1", "RayCluster", namespace, old), group.uid),
            )
        ),
        routes=routes,
    )


def _route(group: Group) -> Route | None:
    """The change that the head's route label needs; None when it is right, or while nobody knows."""
    head = group.head
    said = group.reading.status if group.reading is not None else None
    if head is None or (head.is_engine_ready and said is None):
        return None
    wanted = head.is_engine_ready and said is not None and said.state in _TAKES_REQUESTS
    return None if wanted == head.is_routed else Route(pod=head, wanted=wanted)
