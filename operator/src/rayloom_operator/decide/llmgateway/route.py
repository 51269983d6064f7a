"""The HTTPRoute or Ingress of an LLMGateway: the objects to apply and delete, the status and its faults. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.api.gateway.stored import RouteStatus
from rayloom_operator.api.llmgateway.stored import stored_status
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.decide.route import RouteSight, judged_route, next_looks, route_fault
from rayloom_operator.names import Manifest, object_path
from rayloom_operator.objects.gateway.route import ROUTE_VERSIONS, route_object
from rayloom_operator.objects.llmgateway import identity
from rayloom_operator.observe.observed import Verdict


def route_objects(situation: GatewaySituation) -> Iterator[Manifest]:
    """Yields the route to apply; none while the API server does not know its kind, or the spec cannot be read."""
    gateway = situation.gateway
    route = _wanted_route(situation)
    if gateway is None or route is None or route.kind in situation.unknown_kinds:
        return
    yield route_object(route, identity.metadata(gateway), identity.object_name(gateway.metadata.name))


def route_deletions(situation: GatewaySituation) -> Iterator[Deletion]:
    """Yields the routes that exist and are not wanted or allowed any more; none while the spec cannot be read."""
    gateway = situation.gateway
    if gateway is None:
        return
    meta = gateway.metadata
    route = _wanted_route(situation)
    for kind, seen in situation.routes.items():
        if route is None or kind != route.kind:
            path = object_path(ROUTE_VERSIONS[kind], kind, meta.namespace, identity.object_name(meta.name))
            yield Deletion(path, seen.uid, owner_uid=meta.uid)


def route_status(situation: GatewaySituation) -> RouteStatus | None:
    """Returns status.route; None without a route. While the spec cannot be read, returns the last written one."""
    gateway = situation.gateway
    if gateway is None:
        return stored_status(situation.previous).route
    route = gateway.spec.route
    if route is None:
        return None
    sight = RouteSight(
        seen=situation.routes.get(route.kind),
        not_allowed=situation.settings.permissions.route_problem(route),
        knows_kind=route.kind not in situation.unknown_kinds,
        refusal=situation.route_refusal,
        now=situation.now.wall,
    )
    return judged_route(route, gateway.metadata.namespace, sight)


def route_problem(situation: GatewaySituation) -> Verdict | None:
    """Returns why clients outside of the cluster do not reach the gateway pods; None without a route or a fault."""
    return route_fault(route_status(situation))


def route_requeues(situation: GatewaySituation) -> Iterator[float]:
    """Yields the seconds until the state of the route may change without an event."""
    if situation.gateway is None:
        return
    found = route_status(situation)
    if found is not None:
        yield from next_looks(found, situation.routes.get(found.kind), situation.now.wall)


def _wanted_route(situation: GatewaySituation) -> GatewayRoute | None:
    gateway = situation.gateway
    route = None if gateway is None else gateway.spec.route
    return None if route is None or situation.settings.permissions.route_problem(route) else route
