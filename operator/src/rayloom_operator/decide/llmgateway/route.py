"""The HTTPRoute or Ingress of an LLMGateway: the objects to apply and delete, the status and its faults. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.api.gateway.stored import RouteStatus
from rayloom_operator.api.llmgateway.stored import stored_status
from rayloom_operator.decide.changes.route import RoutePlan
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.decide.route import RouteSight, former_kind, judged_route, next_looks, route_fault
from rayloom_operator.objects.llmgateway import identity
from rayloom_operator.observe.observed import Verdict


def route_plan(situation: GatewaySituation) -> RoutePlan | None:
    """Returns the plan for the route; None while the spec cannot be read, so that an existing route stays."""
    gateway = situation.gateway
    if gateway is None:
        return None
    status = route_status(situation)
    return RoutePlan(
        metadata=identity.metadata(gateway),
        owner_uid=gateway.metadata.uid,
        route=gateway.spec.route,
        permissions=situation.settings.permissions,
        seen=situation.routes,
        unknown_kinds=situation.unknown_kinds,
        is_accepted=status is not None and status.accepted,
    )


def route_status(situation: GatewaySituation) -> RouteStatus | None:
    """Returns status.route; None without a route. While the spec cannot be read: status.route as last written."""
    gateway = situation.gateway
    if gateway is None:
        return stored_status(situation.previous).route
    route = gateway.spec.route
    if route is None:
        return None
    sight = RouteSight(
        seen=situation.routes.get(route.kind),
        former=former_kind(route, situation.routes),
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
