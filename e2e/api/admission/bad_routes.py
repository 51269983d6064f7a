"""Routes to gateways that cannot be served, as rows like those of bad_manifests.py."""

from __future__ import annotations

from typing import Any

_HTTP = {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}
_HOST = "use a DNS name in lower case, without port, path and '*', such as llm.example.com"
_PATH = "a path begins with '/' and does not end with one, such as /v1"
_ONE = "give exactly one of httpRoute and ingress"
_PARENTS = "name the Gateways that take the route, 1 to 8 of them, and none twice"
_NAME = "use the name of an object: lower-case letters, digits, '-' and '.'"


def _route(replicas: int = 2, **fields: Any) -> dict[str, Any]:
    gateway = {"replicas": replicas, "route": fields}
    return {"spec": {"model": {"source": "builtin://smollm2-135m"}, "gateway": gateway}}


def _http(**fields: Any) -> dict[str, Any]:
    return _route(httpRoute=_HTTP | fields)


def _ingress(**fields: Any) -> dict[str, Any]:
    return _route(ingress={"host": "llm.example.com", **fields})


ROUTES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("a route of both kinds", _route(httpRoute=_HTTP, ingress={"host": "a.com"}), _ONE),
    ("a route of no kind", _route(), _ONE),
    ("a route of an unknown kind", _route(gateway={}), 'unknown field "spec.gateway.route.gateway"'),
    ("a route to no gateway pods", _route(0, httpRoute=_HTTP), "raise gateway.replicas to 1 or more, or remove"),
    ("a route without Gateways", _http(parentRefs=[]), _PARENTS),
    ("a route with nine Gateways", _http(parentRefs=[{"name": f"g{n}"} for n in range(9)]), "at most 8 items"),
    ("a route with one Gateway twice", _http(parentRefs=[{"name": "a"}, {"name": "a"}]), _PARENTS),
    ("a route with a Gateway without a name", _http(parentRefs=[{"port": 443}]), "parentRefs[0].name: Required value"),
    ("a route with a wrong port", _http(parentRefs=[{"name": "a", "port": 65536}]), "less than or equal to 65535"),
    ("a route without host names", _http(hostnames=[]), "give 1 to 16 host names"),
    ("a route with a wildcard", _http(hostnames=["*.example.com"]), _HOST),
    ("a route with an address", _ingress(host="10.0.0.7"), _HOST),
    ("a route with a URL as host", _ingress(host="https://llm.example.com"), _HOST),
    ("a route without a host", _route(ingress={}), "spec.gateway.route.ingress.host: Required value"),
    ("a route with a path without /", _ingress(path="v1"), _PATH),
    ("a route with a path that ends with /", _http(path="/v1/"), _PATH),
    ("a route with a wrong name of a Secret", _ingress(tlsSecretName="LLM TLS"), _NAME),
    (
        "a route with a snippet",
        _ingress(annotations={"nginx.ingress.kubernetes.io/server-snippet": "x"}),
        "annotations that end with '-snippet' change the proxy itself",
    ),
    ("a route with the operator's label", _http(labels={"rayloom.dev/service": "x"}), "labels of rayloom.dev itself"),
)
