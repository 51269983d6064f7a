"""`spec.gateway.route` in a manifest: its URL, and the exact message for each mistake."""

import pytest

from rayloom_operator.errors import SpecError
from rt_operator import make_service

HTTP = {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}
INGRESS = {"host": "llm.example.com"}
ONE = "gateway.route: give exactly one of httpRoute and ingress"
HOST = "use a DNS name in lower case, without port, path and '*', such as llm.example.com"
PATH = "a path begins with '/' and does not end with one, such as /v1; '/' alone is every path"
PARENTS = "name the Gateways that take the route, 1 to 8 of them, and none twice"
NAME = "use the name of an object: lower-case letters, digits, '-' and '.'"


def http(**fields):
    return {"route": {"httpRoute": HTTP | fields}}


def ingress(**fields):
    return {"route": {"ingress": INGRESS | fields}}


def to(*ports):
    return [{"name": f"public-{number}", "port": port} for number, port in enumerate(ports)]


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        (http(), "https://llm.example.com/v1"),
        (http(path="/"), "https://llm.example.com"),
        (http(hostnames=["a.example.com", "b.example.com"]), "https://a.example.com/v1"),
        (http(parentRefs=to(80)), "http://llm.example.com/v1"),
        (http(parentRefs=to(80, 443)), "https://llm.example.com/v1"),
        (http(parentRefs=to(8443)), "https://llm.example.com:8443/v1"),
        (ingress(path="/llm/chat"), "http://llm.example.com/llm/chat"),
        (ingress(tlsSecretName="llm-tls"), "https://llm.example.com/v1"),
        (ingress(path="/"), "http://llm.example.com"),
    ],
)
def test_the_url_has_the_first_host_and_tls_where_it_is_known(gateway, url):
    assert make_service(gateway=gateway).spec.gateway.route.url == url


def test_a_gateway_has_no_route_unless_it_is_asked_for():
    assert make_service(gateway={}).spec.gateway.route is None


@pytest.mark.parametrize(
    ("gateway", "sentence"),
    [
        ({"route": {"httpRoute": HTTP, "ingress": INGRESS}}, ONE),
        ({"route": {}}, ONE),
        ({"route": []}, "gateway.route: [] is not allowed; this must be a map"),
        ({"route": {"ingres": INGRESS}}, "gateway.route.ingres: is not a field; did you mean ingress?"),
        (
            http() | {"replicas": 0},
            "gateway: a route leads to gateway pods: raise gateway.replicas to 1 or more, or remove gateway.route",
        ),
        (http(parentRefs=[]), f"gateway.route.httpRoute.parentRefs: 0 Gateways are given: {PARENTS}"),
        (http(parentRefs=to(*range(1, 10))), f"gateway.route.httpRoute.parentRefs: 9 Gateways are given: {PARENTS}"),
        (http(parentRefs=[{"name": "a"}] * 2), f"gateway.route.httpRoute.parentRefs: 2 Gateways are given: {PARENTS}"),
        (http(parentRefs=[{}]), "gateway.route.httpRoute.parentRefs[0].name: is missing; add it. Name of the Gateway."),
        (http(parentRefs=to(0)), "gateway.route.httpRoute.parentRefs[0].port: 0 is too small; use 1 or more"),
        (http(parentRefs=[{"name": "A"}]), f"gateway.route.httpRoute.parentRefs[0].name: 'A' is not possible: {NAME}"),
        (
            http(parentRefs=[{"name": "a", "kind": "Service"}]),
            "gateway.route.httpRoute.parentRefs[0].kind: is not a field; remove it. Fields here: name, namespace, "
            "sectionName, port",
        ),
        (http(hostnames=[]), "gateway.route.httpRoute.hostnames: 0 host names are given: give 1 to 16 host names"),
        (
            http(hostnames=["*.example.com"]),
            f"gateway.route.httpRoute.hostnames[0]: '*.example.com' is not possible: {HOST}",
        ),
        (ingress(host="10.0.0.7"), f"gateway.route.ingress.host: '10.0.0.7' is not possible: {HOST}"),
        (ingress(host="LLM.example.com"), f"gateway.route.ingress.host: 'LLM.example.com' is not possible: {HOST}"),
        (
            ingress(host="https://a.com"),
            f"gateway.route.ingress.host: 'https://a.com' is not possible: {HOST}",
        ),
        ({"route": {"ingress": {}}}, "gateway.route.ingress.host: is missing; add it. Host name of the URL."),
        (ingress(path="v1"), f"gateway.route.ingress.path: 'v1' is not possible: {PATH}"),
        (ingress(path="/v1/"), f"gateway.route.ingress.path: '/v1/' is not possible: {PATH}"),
        (ingress(path=""), f"gateway.route.ingress.path: '' is not possible: {PATH}"),
        (ingress(path="/a?b"), f"gateway.route.ingress.path: '/a?b' is not possible: {PATH}"),
        (ingress(tlsSecretName="My TLS"), f"gateway.route.ingress.tlsSecretName: 'My TLS' is not possible: {NAME}"),
        (
            ingress(annotations={"nginx.ingress.kubernetes.io/server-snippet": "x"}),
            "gateway.route.ingress.annotations: nginx.ingress.kubernetes.io/server-snippet: annotations that end with "
            "'-snippet' change the proxy itself: write an Ingress of your own for them",
        ),
        (
            ingress(labels={"rayloom.dev/service": "other"}),
            "gateway.route.ingress.labels: rayloom.dev/service: the operator sets app.kubernetes.io/managed-by and "
            "labels of rayloom.dev itself: remove them",
        ),
    ],
)
def test_a_mistake_is_answered_with_its_cure(gateway, sentence):
    with pytest.raises(SpecError) as refused:
        make_service(gateway=gateway)

    (line,) = refused.value.problems
    assert line == f"spec.{sentence}"
