"""Decides which HTTPRoute or Ingress of the gateway is applied and which is deleted. Pure.

Unlike the gateway's other objects, routes are not announced in the status: a watch shows which of them exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.situation import Situation
from rayloom_operator.names import Manifest, gateway_name, metadata, object_path
from rayloom_operator.objects.gateway.route import ROUTE_VERSIONS, route_object
from rayloom_operator.resolve.resolved import Resolved


def route_objects(situation: Situation, resolved: Resolved) -> Iterator[Manifest]:
    """Yields the route to apply; none while the API server does not know its kind."""
    service = resolved.service
    route = _wanted_route(situation, resolved)
    if route is None or route.kind in situation.observed.unknown_kinds:
        return
    name = gateway_name(service.metadata.name)
    yield route_object(route, metadata(service, name), name)


def route_deletions(situation: Situation, resolved: Resolved) -> Iterator[Deletion]:
    """Yields the routes that exist and are not wanted any more, or not allowed any more."""
    meta = resolved.service.metadata
    route = _wanted_route(situation, resolved)
    for kind, seen in situation.observed.routes.items():
        if route is None or kind != route.kind:
            path = object_path(ROUTE_VERSIONS[kind], kind, meta.namespace, gateway_name(meta.name))
            yield Deletion(path, seen.uid, owner_uid=meta.uid)


def _wanted_route(situation: Situation, resolved: Resolved) -> GatewayRoute | None:
    gateway = resolved.service.spec.gateway
    route = None if gateway is None else gateway.route
    return None if route is None or situation.settings.permissions.route_problem(route) else route
