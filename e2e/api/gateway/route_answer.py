"""An HTTPRoute for `spec.gateway.route`, and the status that controllers write into HTTPRoutes and Ingresses."""

from __future__ import annotations

from real_api_server.world import World
from simulated_nodes.api_client import MERGE

HTTP_ROUTE = {"httpRoute": {"parentRefs": [{"name": "public", "namespace": "edge"}], "hostnames": ["llm.example.com"]}}


def answer(world: World, path: str, holds: str, reason: str, message: str = "") -> None:
    """Writes the report of the first Gateway's controller into the HTTPRoute at `path`."""
    route = world.request("GET", path)
    common = {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": route["metadata"]["generation"]}
    accepted = common | {"type": "Accepted", "status": holds, "reason": reason, "message": message}
    resolved = common | {"type": "ResolvedRefs", "status": "True", "reason": "ResolvedRefs", "message": ""}
    report = {"controllerName": "example.com/controller", "conditions": [accepted, resolved]}
    parents = [report | {"parentRef": route["spec"]["parentRefs"][0]}]
    world.request("PATCH", f"{path}/status", {"status": {"parents": parents}}, content_type=MERGE)


def take_ingress(world: World, path: str) -> None:
    """Writes an address into the Ingress at `path`, as its controller does."""
    address = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}}
    world.request("PATCH", f"{path}/status", address, content_type=MERGE)
