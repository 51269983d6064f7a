"""What to change in the cluster so that it becomes what a service asks for. Pure.

A service has one group today. When its spec changes, the group of the old revision is deleted and one of the new
revision is made in the same pass: the service is away while the new engine starts. Nothing of a running group is ever
changed but its route label.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.api import LLMService
from rayloom_operator.names import Manifest, group_name
from rayloom_operator.objects.admin_secret import admin_secret, admin_secret_name
from rayloom_operator.objects.config_map import config_map
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.objects.service import service as client_service
from rayloom_operator.objects.service_account import service_account
from rayloom_operator.observed import Group, Observed, Pod
from rayloom_operator.revision import revision

# States in which an engine takes requests; while it recovers they wait in it.
_TAKES_REQUESTS = ("serving", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator was started with."""

    engine_image: str  # of engines whose service names none
    operator_key: bytes  # admin tokens are derived from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """An object to delete. The uid, where known, keeps a later object of the same name safe."""

    api_version: str
    kind: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A head pod that begins or ceases to take requests of the service."""

    pod: Pod
    wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """In this order: `routes`, `deletions`, `applied`."""

    applied: tuple[Manifest, ...] = ()
    deletions: tuple[Deletion, ...] = ()
    routes: tuple[Route, ...] = ()


def plan(service: LLMService | None, observed: Observed, settings: Settings) -> Plan:
    """What to do now. `service` is None while the spec cannot be used: then what runs goes on as it is."""
    routes = tuple(route for group in observed.groups if (route := _route(group)))
    if service is None:
        return Plan(routes=routes)
    image = resolved_image(service, settings)
    current = revision(service, image)
    lasting = (service_account(service), client_service(service))
    # What a group is made of is never changed, also by an operator of another version that would build it otherwise.
    # The RayCluster comes last, so where it exists the others were made.
    name = group_name(service.metadata.name, current)
    made = (
        config_map(service, current),
        admin_secret(service, current, settings.operator_key),
        ray_cluster(service, current, image),
    )
    return Plan(
        applied=lasting if any(group.name == name for group in observed.groups) else lasting + made,
        deletions=tuple(deletion for group in observed.groups if group.name != name for deletion in _deletions(group)),
        routes=routes,
    )


def resolved_image(service: LLMService, settings: Settings) -> str:
    """The image of the engine's pods."""
    return service.spec.engine.image or settings.engine_image


def _route(group: Group) -> Route | None:
    """The change that the head's route label needs; None when it is right, or while nobody knows."""
    head = group.head
    if head is None:
        return None
    said = group.reading.status if group.reading is not None else None
    if not head.is_engine_ready:
        wanted = False
    elif said is not None:
        wanted = said.state in _TAKES_REQUESTS
    else:
        return None
    return None if wanted == head.is_routed else Route(pod=head, wanted=wanted)


def _deletions(group: Group) -> tuple[Deletion, ...]:
    # The RayCluster goes last: while it is listed, whoever was interrupted here knows what is left to do.
    return (
        Deletion(api_version="v1", kind="ConfigMap", name=group.name),
        Deletion(api_version="v1", kind="Secret", name=admin_secret_name(group.name)),
        Deletion(api_version="ray.io/v1", kind="RayCluster", name=group.name, uid=group.uid),
    )
