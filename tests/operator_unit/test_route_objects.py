"""The HTTPRoute and the Ingress of a gateway: their fields, and edits by somebody else."""

import copy

import msgspec
import pytest

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.names import path_of
from rayloom_operator.objects.gateway.route import route_object
from rayloom_operator.observe.applied_fields import SHAPES, WATCHED_SHAPES
from rayloom_operator.observe.drift import Drift
from rt_fake_kube import FakeKube

KEY = ("team", "chat")
# Any kind may own a route.
META = {
    "name": "many-gateway",
    "namespace": "team",
    "labels": {"rayloom.dev/service": "chat", "app.kubernetes.io/managed-by": "rayloom-operator"},
    "ownerReferences": [{"apiVersion": "example.com/v1", "kind": "Other", "name": "many", "uid": "uid-1"}],
}
PARENT = {"name": "public", "namespace": "edge", "sectionName": "https", "port": 443}
HTTP = {"parentRefs": [PARENT, {"name": "inner"}], "hostnames": ["a.example.com", "b.example.com"], "path": "/v1"}
INGRESS = {"className": "traefik", "host": "a.example.com", "path": "/v1", "tlsSecretName": "a-tls"}
MARKS = {"annotations": {"example.com/note": "x"}, "labels": {"team": "blue"}}


def made(**route):
    return route_object(GatewayRoute.model_validate(route), META, "many-gateway")


ROUTE, ENTRY = made(httpRoute=HTTP | MARKS), made(ingress=INGRESS | MARKS)


def test_an_http_route_leads_every_path_below_the_prefix_to_the_service_without_a_time_limit():
    gateway_api = "gateway.networking.k8s.io"
    assert {
        "apiVersion": f"{gateway_api}/v1",
        "kind": "HTTPRoute",
        "metadata": META | {"labels": {"team": "blue", **META["labels"]}, "annotations": {"example.com/note": "x"}},
        "spec": {
            "parentRefs": [
                {"group": gateway_api, "kind": "Gateway", **PARENT},
                {"group": gateway_api, "kind": "Gateway", "name": "inner"},
            ],
            "hostnames": ["a.example.com", "b.example.com"],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [
                        {"group": "", "kind": "Service", "name": "many-gateway", "port": 8000, "weight": 1}
                    ],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    } == ROUTE
    assert path_of(ROUTE) == f"/apis/{gateway_api}/v1/namespaces/team/httproutes/many-gateway"


def test_an_ingress_leads_the_host_to_the_service_with_the_certificate():
    backend = {"service": {"name": "many-gateway", "port": {"number": 8000}}}
    assert ENTRY["spec"] == {
        "ingressClassName": "traefik",
        "tls": [{"hosts": ["a.example.com"], "secretName": "a-tls"}],
        "rules": [
            {
                "host": "a.example.com",
                "http": {"paths": [{"path": "/v1", "pathType": "Prefix", "backend": backend}]},
            }
        ],
    }
    assert path_of(ENTRY) == "/apis/networking.k8s.io/v1/namespaces/team/ingresses/many-gateway"


def test_fields_that_are_left_out_are_left_to_the_cluster():
    ingress = made(ingress={"host": "a.example.com"})

    assert ingress["metadata"] == META
    assert set(ingress["spec"]) == {"rules"}
    assert META["labels"].keys() == {"rayloom.dev/service", "app.kubernetes.io/managed-by"}  # inputs are not changed


def as_returned(manifest):
    """The object with the fields that the API server and the controller add."""
    found = copy.deepcopy(manifest)
    found["metadata"] |= {"uid": "uid-route", "resourceVersion": "7", "generation": 1}
    return found | {"status": {"loadBalancer": {}}}


def with_drift(manifest):
    drift = Drift(FakeKube(), lambda _: None)
    (reflector,) = [each for each in drift.reflectors if each._kind == manifest["kind"]]
    return drift, reflector


def taken(reflector, found):
    reflector.take("MODIFIED", msgspec.convert(copy.deepcopy(found), WATCHED_SHAPES[found["kind"]]))


@pytest.mark.parametrize("manifest", [ROUTE, ENTRY], ids=["HTTPRoute", "Ingress"])
def test_the_digest_has_every_field(manifest):
    kept = msgspec.convert(manifest, SHAPES[manifest["kind"]])

    assert {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], **kept} == manifest


@pytest.mark.parametrize("manifest", [ROUTE, ENTRY], ids=["HTTPRoute", "Ingress"])
def test_a_restarted_operator_finds_an_unchanged_route_right_and_an_edited_one_not(manifest):
    for edit, is_right in ((lambda _: None, True), (lambda spec: spec.pop("rules"), False)):
        drift, reflector = with_drift(manifest)
        found = as_returned(manifest)
        edit(found["spec"])
        taken(reflector, found)
        assert drift.is_right(KEY, manifest, drift.take_listed(KEY)) is is_right


@pytest.mark.parametrize("manifest", [ROUTE, ENTRY], ids=["HTTPRoute", "Ingress"])
def test_a_controllers_status_is_no_drift_and_an_edited_spec_or_annotation_is(manifest):
    drift, reflector = with_drift(manifest)
    found = as_returned(manifest)
    drift.wrote(KEY, found)
    found["metadata"]["resourceVersion"] = "8"
    found["status"] = {"parents": [], "loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}
    taken(reflector, found)
    assert not drift.take(KEY)
    found["metadata"]["annotations"] = {"example.com/note": "other"}
    taken(reflector, found)
    assert drift.take(KEY)
    drift.wrote(KEY, found)
    found["metadata"]["generation"] = 2
    taken(reflector, found)
    assert drift.take(KEY)
