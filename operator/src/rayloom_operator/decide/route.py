"""The state of the HTTPRoute or Ingress that leads to gateways: status.gateway.route, and its faults. Pure.

`judged_route` and the functions below it work for LLMServices and for LLMGateways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from rayloom_operator.api.gateway.route import GatewayRoute, HttpRoute, ParentRef
from rayloom_operator.api.gateway.stored import RouteStatus
from rayloom_operator.api.status import Reason, stored_gateway
from rayloom_operator.decide.situation import Situation
from rayloom_operator.objects.gateway.route import HTTP_ROUTE
from rayloom_operator.observe.observed import MAX_MESSAGE, ParentReport, SeenRoute, Verdict
from rayloom_operator.texts import head, plain

ACCEPTED = "Accepted"
PENDING = "Pending"
_FAULTS = (Reason.NOT_ALLOWED, Reason.ROUTE_NOT_ACCEPTED, Reason.ROUTE_REFUSED, Reason.GATEWAY_API_MISSING)
# For a Gateway that does not exist, no controller writes anything into the HTTPRoute. The missing answer counts as a
# fault after this many seconds.
_SILENCE_S = 60.0
# The seconds after which the operator asks again whether the API server knows the kind HTTPRoute.
_MISSING_KIND_S = 10.0
_MISSING = (
    "The cluster does not know HTTPRoutes. Install the CustomResourceDefinition httproutes.gateway.networking.k8s.io "
    "of the Gateway API, version 1.2 or newer (standard channel), and its controller, or give the route `ingress` in "
    "place of `httpRoute`."
)
_NO_ADDRESS = (
    "No controller has written an address into the Ingress. Some controllers never do; if the URL does not work, check "
    "`ingress.className` of the route."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSight:
    """Everything that is known about the object of a route."""

    seen: SeenRoute | None  # None while the object does not exist
    former: str = ""  # kind of an earlier spec's route whose object still exists; empty if there is none
    not_allowed: str = ""  # why the operator's settings forbid the route; empty if they allow it
    knows_kind: bool = True  # the API server knows the kind of the route
    refusal: str = ""  # why the object could not be written; empty after a successful write
    now: datetime


class _Judgement(NamedTuple):
    accepted: bool
    reason: str
    message: str


def route_status(situation: Situation) -> RouteStatus | None:
    """Returns status.gateway.route; None without a route."""
    if situation.resolved is None:
        stored = stored_gateway(situation.previous)
        return None if stored is None else stored.route
    service = situation.resolved.service
    if service.spec.gateway is None or service.spec.gateway.route is None:
        return None
    route = service.spec.gateway.route
    return judged_route(route, service.metadata.namespace, _sight(situation, route))


def route_problem(situation: Situation) -> Verdict | None:
    """Returns why clients outside of the cluster do not reach the gateways; None without a route or a fault."""
    return route_fault(route_status(situation))


def route_requeues(situation: Situation) -> Iterator[float]:
    """Yields the seconds until the state of the route may change without an event."""
    found = route_status(situation)
    if found is not None and situation.resolved is not None:
        yield from next_looks(found, situation.observed.routes.get(found.kind), situation.now.wall)


def missing_kind(status: RouteStatus | None) -> str:
    """Returns the kind that a route needs and that the API server does not know; empty if it knows the kind."""
    return status.kind if status is not None and status.reason == Reason.GATEWAY_API_MISSING else ""


def judged_route(route: GatewayRoute, namespace: str, sight: RouteSight) -> RouteStatus:
    """Returns the status of a route whose object is in this namespace."""
    accepted, reason, message = _judgement(route, namespace, sight)
    if sight.former and not accepted and reason != Reason.NOT_ALLOWED:
        message += (
            f" The {sight.former} of the same name, from an earlier spec, stays until the {route.kind} is accepted; "
            "delete it if no client uses it."
        )
    return RouteStatus(kind=route.kind, url=route.url, accepted=accepted, reason=reason, message=message)


def former_kind(route: GatewayRoute, seen: Mapping[str, SeenRoute]) -> str:
    """Returns the kind of an existing object whose kind differs from the route's; empty if there is none.

    `seen`: kind -> object.
    """
    return next((kind for kind in seen if kind != route.kind), "")


def next_looks(status: RouteStatus, seen: SeenRoute | None, now: datetime) -> Iterator[float]:
    """Yields the seconds until this status of a route may change without an event. `seen`: the route's object."""
    if status.reason == Reason.GATEWAY_API_MISSING:
        yield _MISSING_KIND_S
    if status.reason == PENDING and status.kind == HTTP_ROUTE and seen is not None:
        yield (_late_at(seen) - now).total_seconds()


def route_fault(status: RouteStatus | None) -> Verdict | None:
    """Returns the fault that a route's status reports; None if it reports none."""
    if status is None or status.reason not in _FAULTS:
        return None
    return Verdict(reason=Reason(status.reason), message=f"The gateway's route: {status.message}")


def _sight(situation: Situation, route: GatewayRoute) -> RouteSight:
    return RouteSight(
        seen=situation.observed.routes.get(route.kind),
        former=former_kind(route, situation.observed.routes),
        not_allowed=situation.settings.permissions.route_problem(route),
        knows_kind=route.kind not in situation.observed.unknown_kinds,
        refusal=situation.route_refusal,
        now=situation.now.wall,
    )


def _judgement(route: GatewayRoute, namespace: str, sight: RouteSight) -> _Judgement:
    if sight.not_allowed:
        return _Judgement(False, Reason.NOT_ALLOWED, sight.not_allowed)
    if not sight.knows_kind:
        return _Judgement(False, Reason.GATEWAY_API_MISSING, _MISSING)
    if sight.refusal:
        return _Judgement(False, Reason.ROUTE_REFUSED, sight.refusal)
    if sight.seen is None:
        return _Judgement(False, PENDING, f"The {route.kind} does not exist yet.")
    if route.http_route is not None:
        return _answer_of_gateways(route.http_route, namespace, sight.seen, sight.now)
    if not sight.seen.address:
        return _Judgement(False, PENDING, _NO_ADDRESS)
    return _Judgement(True, ACCEPTED, f"A controller has written the address {sight.seen.address} into the Ingress.")


def _answer_of_gateways(route: HttpRoute, namespace: str, seen: SeenRoute, now: datetime) -> _Judgement:
    """Returns the first refusal by a Gateway, else the missing answer of a Gateway, else the acceptance by all."""
    silent = []
    for parent in route.parent_refs:
        reports = [each for each in seen.parents if _is_about(each, parent, namespace)]
        refusal = next((each for each in reports if each.refused), None)
        if refusal is not None:
            return _Judgement(False, Reason.ROUTE_NOT_ACCEPTED, _refusal(refusal, _named(parent, namespace)))
        if not reports:
            silent.append(_named(parent, namespace))
    if not silent:
        return _Judgement(True, ACCEPTED, "Every Gateway has accepted the HTTPRoute.")
    if now < _late_at(seen):
        return _Judgement(False, PENDING, f"No controller has reported about the HTTPRoute for {silent[0]} yet.")
    message = (
        f"No controller has accepted the HTTPRoute for {silent[0]}. Check that this Gateway exists, with the listener "
        "that the route names, and that the controller of its class runs."
    )
    return _Judgement(False, Reason.ROUTE_NOT_ACCEPTED, message)


def _is_about(report: ParentReport, parent: ParentRef, namespace: str) -> bool:
    where = report.namespace or namespace
    found = (report.name, where, report.section_name, report.port)
    return found == (parent.name, parent.namespace or namespace, parent.section_name, parent.port)


def _refusal(report: ParentReport, gateway: str) -> str:
    # Empty parts are left out, because Traefik refuses without a message.
    said = head(plain(": ".join(filter(None, (report.reason, report.message)))), MAX_MESSAGE)
    if report.refused == ACCEPTED:
        return f"{gateway} does not accept the HTTPRoute: {said}"
    return f"{gateway} cannot follow the HTTPRoute to the Service: {said}"


def _named(parent: ParentRef, namespace: str) -> str:
    """Returns the Gateway, with the listener and the port by which parentRefs of the same Gateway differ."""
    gateway = f"Gateway {parent.name} in namespace {parent.namespace or namespace}"
    listener = [] if parent.section_name is None else [f"listener {parent.section_name}"]
    port = [] if parent.port is None else [f"port {parent.port}"]
    return f"{gateway} ({', '.join(listener + port)})" if listener or port else gateway


def _late_at(seen: SeenRoute) -> datetime:
    return seen.created_at + timedelta(seconds=_SILENCE_S)
