"""`spec.gateway` in a manifest: its defaults, and the exact message for each mistake."""

import pytest

from rayloom_operator.errors import SpecError
from rt_operator import make_service


def test_a_part_without_fields_asks_for_two_gateways():
    gateway = make_service(gateway={}).spec.gateway

    assert (gateway.replicas, gateway.image, gateway.hold_seconds) == (2, None, 300)
    assert (gateway.resources.requests, gateway.resources.limits) == ({}, {})


def test_a_service_without_the_part_has_no_gateway():
    assert make_service().spec.gateway is None


def test_a_gateway_is_read_field_by_field():
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1024Mi"}}

    gateway = make_service(
        gateway={"replicas": 16, "image": "own/gateway:1", "holdSeconds": 0, "resources": resources}
    ).spec.gateway

    assert (gateway.replicas, gateway.image, gateway.hold_seconds) == (16, "own/gateway:1", 0)
    assert gateway.resources.requests == {"cpu": "500m", "memory": "1Gi"}
    assert gateway.resources.limits == {"memory": "1024Mi"}


@pytest.mark.parametrize(
    ("gateway", "sentence"),
    [
        (2, "gateway: 2 is not allowed; this must be a map"),
        ([], "gateway: [] is not allowed; this must be a map"),
        (
            {"replicas": -1},
            "gateway.replicas: -1 is not possible: use 0 to 16 gateway pods; with 0, clients reach the engines "
            "directly",
        ),
        (
            {"replicas": 17},
            "gateway.replicas: 17 is not possible: use 0 to 16 gateway pods; with 0, clients reach the engines "
            "directly",
        ),
        ({"replicas": "2"}, "gateway.replicas: '2' is not allowed; this must be a whole number"),
        ({"image": ""}, "gateway.image: is empty; give it a value, or remove the field"),
        ({"image": 7}, "gateway.image: 7 is not allowed; this must be text; put it in quotes"),
        ({"resources": []}, "gateway.resources: [] is not allowed; this must be a map"),
        (
            {"resources": {"requests": {"cpu": 1}}},
            "gateway.resources.requests.cpu: 1 is not allowed; this must be text; put it in quotes",
        ),
        (
            {"resources": {"limits": {"memory": "much"}}},
            "gateway.resources.limits.memory: 'much' is not allowed",
        ),
        (
            {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
            "gateway.resources.limits: nvidia.com/gpu: a gateway uses cpu, memory and ephemeral-storage only: remove "
            "the other resources",
        ),
        (
            {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}},
            "gateway.resources: the request memory 2Gi is more than the limit 1Gi: lower it, or raise the limit",
        ),
        ({"holdSeconds": -1}, "gateway.holdSeconds: -1 is too small; use 0 or more"),
        ({"holdSeconds": 90_000}, "gateway.holdSeconds: 90000 is too large; use 86400 or less"),
        ({"holdSeconds": "5m"}, "gateway.holdSeconds: '5m' is not allowed; this must be a whole number"),
        ({"hold_seconds": 5}, "gateway.hold_seconds: is not a field; did you mean holdSeconds?"),
        (
            {"minReplicas": 1},
            "gateway.minReplicas: is not a field; did you mean replicas?",
        ),
        (
            {"port": 80},
            "gateway.port: is not a field; remove it. Fields here: replicas, image, resources, holdSeconds, route",
        ),
    ],
)
def test_a_mistake_is_answered_with_its_cure(gateway, sentence):
    with pytest.raises(SpecError) as refused:
        make_service(gateway=gateway)

    (line,) = refused.value.problems
    assert line == f"spec.{sentence}"


@pytest.mark.parametrize(("request_", "limit"), [("700m", "0.7"), ("8300M", "8.3G"), ("0.5Gi", "512Mi")])
def test_a_request_may_equal_its_limit_in_another_unit(request_, limit):
    make_service(gateway={"resources": {"requests": {"memory": request_}, "limits": {"memory": limit}}})


_KEYS = {"name": "RAYLOOM_API_KEYS", "value": "a,b"}
_KEYS_OF_SECRET = {"name": "RAYLOOM_API_KEYS", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "keys"}}}


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"env": [_KEYS]}},
        {"podTemplate": {"head": {"spec": {"containers": [{"name": "engine", "env": [_KEYS_OF_SECRET]}]}}}},
    ],
)
@pytest.mark.parametrize("replicas", [2, 0])  # with 0, pods of an LLMGateway may serve the model
def test_keys_that_gateway_pods_would_not_know_are_refused(spec, replicas):
    with pytest.raises(SpecError) as refused:
        make_service(gateway={"replicas": replicas}, **spec)

    (line,) = refused.value.problems
    assert line == (
        "spec: RAYLOOM_API_KEYS does not reach gateway pods, so they would serve everybody: put the keys into a "
        "Secret, name it in spec.auth.apiKeySecretRef, and remove the variable"
    )
    make_service(**spec)  # without gateway pods, clients reach the engines, which know the keys
    make_service(gateway={}, auth={"apiKeySecretRef": {"name": "keys", "key": "keys"}}, **spec)
