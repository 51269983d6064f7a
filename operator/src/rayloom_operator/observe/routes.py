"""The HTTPRoutes and Ingresses that lead to gateways, with the answers of their controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.observed import ParentReport, SeenRoute
from rayloom_operator.times import moment

_READ = ("Accepted", "ResolvedRefs")


class Routes:
    """The routes of each service. `on_change` is called with the key of the service when one of its routes changes."""

    def __init__(self, on_change: Callable[[ServiceKey], None]) -> None:
        self._on_change = on_change
        self._found: dict[ServiceKey, dict[tuple[str, str], SeenRoute]] = {}  # (kind, name) -> route

    def of(self, key: ServiceKey, name: str) -> dict[str, SeenRoute]:
        """Returns kind -> route, for the routes of this name."""
        return {kind: each for (kind, at), each in self._found.get(key, {}).items() if at == name}

    def see(self, key: ServiceKey, kind: str, found: Manifest, is_gone: bool) -> None:
        """Notes the object that a list or watch has delivered."""
        which = kind, found["metadata"]["name"]
        route = None if is_gone else seen_route(found)
        if route == self._found.get(key, {}).get(which):
            return
        if route is None:
            self._found[key].pop(which)
        else:
            self._found.setdefault(key, {})[which] = route
        self._on_change(key)

    def forget(self, key: ServiceKey) -> None:
        """Drops the routes of a deleted service."""
        self._found.pop(key, None)


def seen_route(found: Manifest) -> SeenRoute:
    """Returns those fields of `found`, an HTTPRoute or Ingress, that the operator uses."""
    meta, status = found["metadata"], found.get("status", {})
    addresses = [each.get("hostname") or each.get("ip") for each in status.get("loadBalancer", {}).get("ingress", ())]
    return SeenRoute(
        uid=meta["uid"],
        created_at=moment(meta.get("creationTimestamp", "")),
        parents=tuple(_reports(status.get("parents", ()), meta.get("generation", 0))),
        address=next(filter(None, addresses), ""),
    )


def _reports(parents: Any, generation: int) -> Iterator[ParentReport]:
    for each in parents:
        parent = each.get("parentRef", {})
        conditions = {one.get("type"): one for one in each.get("conditions", ()) if _is_current(one, generation)}
        if "Accepted" not in conditions:
            continue  # the controller has not judged the present spec yet
        refused = next((conditions[name] for name in _READ if _is_false(conditions.get(name))), None)
        yield ParentReport(
            name=parent.get("name", ""),
            namespace=parent.get("namespace", ""),
            section_name=parent.get("sectionName"),
            port=parent.get("port"),
            refused=refused["type"] if refused is not None else "",
            reason=refused.get("reason", "") if refused is not None else "",
            message=refused.get("message", "") if refused is not None else "",
        )


def _is_current(condition: Mapping[str, Any], generation: int) -> bool:
    # Some controllers leave the generation out. Such reports count.
    return int(condition.get("observedGeneration", generation)) >= generation


def _is_false(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") != "True"
