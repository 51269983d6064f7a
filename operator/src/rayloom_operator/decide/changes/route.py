"""RoutePlan: which HTTPRoute or Ingress of gateway pods is applied and which is deleted. Pure.

LLMServices and LLMGateways both use RoutePlan. The status must name all other objects of a gateway before they are
created. The status need not name routes, because a watch shows which routes exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.names import Manifest, object_path
from rayloom_operator.objects.gateway.route import ROUTE_VERSIONS, route_object
from rayloom_operator.observe.observed import SeenRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """The wanted route to the gateway pods of an owner, and the routes that exist."""

    metadata: Manifest  # metadata of the route, with the name of the gateway pods' Service
    owner_uid: str
    route: GatewayRoute | None  # the route in the spec; None if there is none
    permissions: Permissions
    seen: Mapping[str, SeenRoute]  # kind -> route that exists
    unknown_kinds: Set[str]  # kinds that the API server does not know
    is_accepted: bool  # every Gateway has accepted the spec's HTTPRoute, or the spec's Ingress has an address

    def objects(self) -> Iterator[Manifest]:
        """Yields the route to apply; nothing while the API server does not know the kind of the route."""
        route = self._wanted()
        if route is not None and route.kind not in self.unknown_kinds:
            yield route_object(route, self.metadata, self.metadata["name"])

    def deletions(self) -> Iterator[Deletion]:
        """Yields the routes that exist and are not wanted or allowed any more.

        A route of the other kind stays until the wanted route `is_accepted`. Until then, clients may have no other way
        to the gateway pods.
        """
        route = self._wanted()
        for kind, found in self.seen.items():
            if route is None or (kind != route.kind and self.is_accepted):
                path = object_path(ROUTE_VERSIONS[kind], kind, self.metadata["namespace"], self.metadata["name"])
                yield Deletion(path, found.uid, owner_uid=self.owner_uid)

    def _wanted(self) -> GatewayRoute | None:
        route = self.route
        return None if route is None or self.permissions.route_problem(route) else route
