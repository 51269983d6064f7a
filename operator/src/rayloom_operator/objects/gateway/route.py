"""Builds the HTTPRoute or the Ingress that leads to a Service of gateway pods.

The caller gives the metadata with the owner, so these functions serve LLMServices and LLMGateways.
"""

from __future__ import annotations

from rayloom_operator.api.gateway.route import GatewayRoute, HttpRoute, IngressRoute, ParentRef
from rayloom_operator.names import API_PORT, Manifest

GATEWAY_API = "gateway.networking.k8s.io"
HTTP_ROUTE = "HTTPRoute"
INGRESS = "Ingress"
# kind -> apiVersion
ROUTE_VERSIONS = {HTTP_ROUTE: f"{GATEWAY_API}/v1", INGRESS: "networking.k8s.io/v1"}


def route_object(route: GatewayRoute, metadata: Manifest, service: str) -> Manifest:
    """Returns the object that leads to the port for clients of the Service named `service`.

    `metadata` has the object's name, namespace, labels and owner. The labels and annotations in `route` are added.
    """
    if route.ingress is not None:
        return _ingress(route.ingress, metadata, service)
    assert route.http_route is not None
    return _http_route(route.http_route, metadata, service)


def _http_route(route: HttpRoute, metadata: Manifest, service: str) -> Manifest:
    """The HTTPRoute. Every default of the API server is written out, so that a stored object equals the manifest."""
    return {
        "apiVersion": ROUTE_VERSIONS[HTTP_ROUTE],
        "kind": HTTP_ROUTE,
        "metadata": _with_own(metadata, route.annotations, route.labels),
        "spec": {
            "parentRefs": [_parent(each) for each in route.parent_refs],
            "hostnames": list(route.hostnames),
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": route.path}}],
                    "backendRefs": [{"group": "", "kind": "Service", "name": service, "port": API_PORT, "weight": 1}],
                    # A time-out of the request covers a whole stream, and proxies set it by default (Envoy: 15 s).
                    # 0s switches it off: https://gateway-api.sigs.k8s.io/guides/http-timeouts. `backendRequest` is left
                    # out, because it is a limit for one attempt of a request and there is no retry.
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    }


def _parent(parent: ParentRef) -> Manifest:
    found: Manifest = {"group": GATEWAY_API, "kind": "Gateway", "name": parent.name}
    given = {"namespace": parent.namespace, "sectionName": parent.section_name, "port": parent.port}
    return found | {field: value for field, value in given.items() if value is not None}


def _ingress(route: IngressRoute, metadata: Manifest, service: str) -> Manifest:
    backend = {"service": {"name": service, "port": {"number": API_PORT}}}
    path = {"path": route.path, "pathType": "Prefix", "backend": backend}
    spec: Manifest = {"rules": [{"host": route.host, "http": {"paths": [path]}}]}
    if route.class_name is not None:
        spec["ingressClassName"] = route.class_name
    if route.tls_secret_name is not None:
        spec["tls"] = [{"hosts": [route.host], "secretName": route.tls_secret_name}]
    return {
        "apiVersion": ROUTE_VERSIONS[INGRESS],
        "kind": INGRESS,
        "metadata": _with_own(metadata, route.annotations, route.labels),
        "spec": spec,
    }


def _with_own(metadata: Manifest, annotations: dict[str, str], labels: dict[str, str]) -> Manifest:
    found = metadata | {"labels": dict(labels) | metadata["labels"]}
    return found | {"annotations": dict(annotations)} if annotations else found
