"""Decides which objects of the gateway are applied and which are deleted. Pure.

The status names the gateway before the gateway's first object is created, and until the last object is deleted. So a
restarted operator knows which objects may exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.api.spec import LLMService
from rayloom_operator.api.status import stored_gateway
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.route import RoutePlan
from rayloom_operator.decide.route import route_status
from rayloom_operator.decide.situation import Situation
from rayloom_operator.names import Manifest, engines_name, gateway_name, gateway_secret_name, metadata, object_path
from rayloom_operator.objects.gateway.companions import (
    engines_service,
    gateway_budget,
    gateway_secret,
    gateway_service,
)
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.secret_digest import with_digest_of
from rayloom_operator.objects.tls import files as tls_files
from rayloom_operator.objects.tls.tls_secrets import service_secrets
from rayloom_operator.resolve.resolved import Resolved


def num_wanted(resolved: Resolved) -> int:
    """Returns the number of gateway pods that the spec asks for."""
    return resolved.service.spec.gateway.replicas if resolved.service.spec.gateway is not None else 0


def is_announced(situation: Situation, resolved: Resolved) -> bool:
    """Returns whether the gateway's objects may be created: the written status must name every needed object."""
    stored = stored_gateway(situation.previous)
    if stored is None:
        return not has_front_ports(situation, resolved)
    return stored.replicas > 0 or num_wanted(resolved) == 0


def has_front_ports(situation: Situation, resolved: Resolved) -> bool:
    """Returns whether an engine has a port for gateways, or may get one.

    Engines of a revision whose spec is not known may have such a port, too, if the status names a gateway.
    """
    known = [each.resolved for each in situation.revisions if each.resolved is not None]
    if any(each.service.spec.gateway is not None for each in (resolved, *known)):
        return True
    return stored_gateway(situation.previous) is not None and len(known) < len(situation.revisions)


def gateway_objects(situation: Situation, resolved: Resolved) -> Iterator[Manifest]:
    """Yields the objects to apply; nothing until the status names the gateway."""
    service = resolved.service
    if stored_gateway(situation.previous) is not None and has_front_ports(situation, resolved):
        # Head pods always mount the Secrets, so they are needed even if no gateway pod is wanted.
        yield from _secrets_and_digest(situation, service)
    gateway = service.spec.gateway
    if gateway is not None and gateway.replicas > 0 and is_announced(situation, resolved):
        yield gateway_service(service)
        yield gateway_budget(service, gateway)
        yield gateway_deployment(resolved, gateway, situation.settings.pod_tls)
        yield from gateway_route(situation, resolved).objects()


def renewed_secrets(situation: Situation, service: LLMService) -> tuple[Manifest, ...]:
    """Returns the Secrets of engines and gateway pods, and the Service with their digest, if there are certificates.

    Engines and gateway pods keep running while the spec cannot be used, so their certificates must be renewed before
    they expire. A digest that did not cover the new certificates would make a later operator trust the old ones.
    """
    if situation.settings.pod_tls == "off" or stored_gateway(situation.previous) is None:
        return ()
    return _secrets_and_digest(situation, service)


def _secrets_and_digest(situation: Situation, service: LLMService) -> tuple[Manifest, ...]:
    settings = situation.settings
    secrets: tuple[Manifest, ...] = (gateway_secret(service, settings.operator_key),)
    if settings.pod_tls != "off":
        secrets += service_secrets(service, settings.operator_key, settings.previous_key, situation.now.wall)
    return (*secrets, with_digest_of(secrets, engines_service(service), settings.operator_key))


def gateway_route(situation: Situation, resolved: Resolved) -> RoutePlan:
    """Returns the plan for the route to the gateway pods."""
    service = resolved.service
    gateway = service.spec.gateway
    status = route_status(situation)
    return RoutePlan(
        metadata=metadata(service, gateway_name(service.metadata.name)),
        owner_uid=service.metadata.uid,
        route=None if gateway is None else gateway.route,
        permissions=situation.settings.permissions,
        seen=situation.observed.routes,
        unknown_kinds=situation.observed.unknown_kinds,
        is_accepted=status is not None and status.accepted,
    )


def gateway_deletions(situation: Situation, resolved: Resolved) -> Iterator[Deletion]:
    """Yields the objects to delete, as long as the status says that they may exist."""
    stored = stored_gateway(situation.previous)
    if stored is None:
        return
    meta = resolved.service.metadata
    if stored.replicas > 0 and num_wanted(resolved) == 0:
        name = gateway_name(meta.name)
        for api_version, kind in (("v1", "Service"), ("apps/v1", "Deployment"), ("policy/v1", "PodDisruptionBudget")):
            yield Deletion(object_path(api_version, kind, meta.namespace, name), owner_uid=meta.uid)
    if not has_front_ports(situation, resolved):
        engines = object_path("v1", "Service", meta.namespace, engines_name(meta.name))
        yield Deletion(engines, owner_uid=meta.uid)
        service = resolved.service
        # The operator cannot read Secrets, so it cannot check their owner. The names are safe without this check,
        # because they contain a hash of the owner's uid.
        for name in (
            gateway_secret_name(meta.name, meta.uid),
            tls_files.gateway_secret_name(service),
            tls_files.engines_secret_name(service),
        ):
            yield Deletion(object_path("v1", "Secret", meta.namespace, name))
