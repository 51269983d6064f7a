"""The objects of a gateway: the fields on which clients, engines and a cluster depend."""

import base64
import json

import pytest

from rayloom_operator.objects.engine_config import pod_engine_config
from rayloom_operator.objects.gateway.companions import (
    engines_service,
    gateway_budget,
    gateway_endpoint,
    gateway_secret,
    gateway_service,
)
from rayloom_operator.objects.gateway.deployment import gateway_deployment
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved, make_service

REVISION = "00000000"
KEYS = {"auth": {"apiKeySecretRef": {"name": "keys", "key": "all"}}}


def build(gateway=None, **spec):
    resolved = make_resolved(gateway=gateway or {}, **spec)
    return gateway_deployment(resolved, resolved.service.spec.gateway)


def pod(**given):
    return build(**given)["spec"]["template"]["spec"]


def container(**given):
    (only,) = pod(**given)["containers"]
    return only


def config(**given):
    annotations = build(**given)["spec"]["template"]["metadata"]["annotations"]
    return json.loads(annotations["rayloom.dev/gateway-config"])


def sources(found):
    """The names of the files in the folder /etc/rayloom of a pod."""
    (projected,) = [each["projected"]["sources"] for each in found["volumes"] if each["name"] == "config"]
    return [item["path"] for source in projected for part in source.values() for item in part["items"]]


def test_a_gateway_pod_replaces_another_before_that_ends():
    spec = build({"replicas": 3})["spec"]

    assert spec["replicas"] == 3
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    # The NetworkPolicy of the service selects the pod by this label, so the pod may reach the engines.
    assert labels["rayloom.dev/service"] == "chat"
    # The Service and the disruption budget of the engines select pods by these labels.
    assert not {"rayloom.dev/route", "ray.io/node-type", "rayloom.dev/group"} & labels.keys()


def test_a_gateway_pod_is_as_confined_as_a_head_pod():
    head = ray_cluster(make_resolved(), REVISION)["spec"]["headGroupSpec"]["template"]["spec"]
    found = pod()

    for name in ("securityContext", "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks"):
        assert found[name] == head[name]
    assert container()["securityContext"] == head["containers"][0]["securityContext"]
    assert found["tolerations"] == head["tolerations"]
    assert [each["name"] for each in found["volumes"]] == ["config", "scratch"]


def test_a_draining_gateway_has_the_time_that_its_streams_get():
    found = pod(drainSeconds=120)

    assert config(drainSeconds=120)["drain_seconds"] == 120
    assert found["terminationGracePeriodSeconds"] == 135
    assert container()["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "2"]}}}


def test_gateway_pods_are_spread_over_nodes():
    (spread,) = pod()["topologySpreadConstraints"]

    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"] == {"matchLabels": {"rayloom.dev/gateway": "chat"}}


def test_probes_ask_for_requests_and_for_life():
    probes = container()

    assert probes["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000}
    # /health is no liveness probe: it answers 503 until the gateway has a tokenizer, and a restart would not help.
    assert probes["livenessProbe"]["httpGet"] == {"path": "/version", "port": 8000}


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, {"requests": {"cpu": "200m", "memory": "512Mi"}}),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1", "memory": "512Mi"}}),
        ({"limits": {"memory": "1Gi"}}, {"requests": {"cpu": "200m"}, "limits": {"memory": "1Gi"}}),
    ],
)
def test_resources_have_defaults(resources, expected):
    assert container(gateway={"resources": resources})["resources"] == expected


def test_the_image_is_that_of_the_engines_or_its_own():
    assert container()["image"] == "rayloom/engine:test"
    assert container(image="own/engine:2")["image"] == "own/engine:2"
    assert container(gateway={"image": "own/gateway:1"})["image"] == "own/gateway:1"


def test_the_config_has_the_settings_of_the_engine_that_concern_http():
    args = {"toolParser": "hermes", "corsAllowedOrigins": ["*"], "threads": 2, "maxNumSeqs": 8}
    found = config(gateway={"holdSeconds": 60}, model={"source": "builtin://smollm2-135m", "servedName": "m"})

    assert (found["served_model_name"], found["hold_seconds"]) == ("m", 60)
    assert found["engines_dns"] == "chat-engines:8003"
    assert "api_key_file" not in found
    found = config(engine={"args": args}, **KEYS)
    assert (found["tool_parser"], found["cors_allowed_origins"]) == ("hermes", ["*"])
    assert not {"threads", "max_num_seqs"} & found.keys()
    assert found["api_key_file"] == "/etc/rayloom-keys/keys"
    assert pod(**KEYS)["volumes"][-1]["secret"] == {
        "secretName": "keys",
        "items": [{"key": "all", "path": "keys"}],
    }


def test_each_file_that_the_config_names_is_mounted():
    found, files = config(), sources(pod())

    assert files == ["config.json", "gateway/key", "admin/token"]
    assert {found["key_file"], found["admin_token_file"]} == {f"/etc/rayloom/{each}" for each in files[1:]}
    assert container()["command"] == ["rayloom-engine", "gateway", "--config", "/etc/rayloom/config.json"]
    mounts = {each["mountPath"] for each in container()["volumeMounts"]}
    assert mounts == {"/etc/rayloom", "/tmp"}
    assert found["cache_dir"].startswith("/tmp/")


def test_an_engine_behind_gateways_has_a_port_for_them_and_the_same_key():
    resolved = make_resolved(gateway={"replicas": 0})
    head = ray_cluster(resolved, REVISION)["spec"]["headGroupSpec"]["template"]["spec"]
    document = pod_engine_config(resolved)

    assert {name: document[name] for name in document if name.startswith("front_")} == {
        "front_host": "0.0.0.0",
        "front_port": 8003,
        "front_key_file": "/etc/rayloom/gateway/key",
    }
    assert "gateway/key" in sources(head)
    (engine,) = [each for each in head["containers"] if each["name"] == "engine"]
    ports = [each["containerPort"] for each in engine["ports"]]
    assert ports == [8000, 8001, 8002, 8003]
    secrets = {
        source["secret"]["name"]
        for found in (head, pod())
        for volume in found["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if "secret" in source
    }
    assert gateway_secret(resolved.service, b"k" * 16)["metadata"]["name"] in secrets


def test_an_engine_without_gateways_is_built_as_before():
    resolved = make_resolved()

    assert not [name for name in pod_engine_config(resolved) if name.startswith("front_")]
    assert "gateway" not in json.dumps(ray_cluster(resolved, REVISION))


def test_the_services_select_gateways_and_routed_engines():
    service = make_service(gateway={})
    clients, engines = gateway_service(service), engines_service(service)

    assert clients["metadata"]["name"] == "chat-gateway"
    assert clients["spec"]["selector"] == {"rayloom.dev/gateway": "chat"}
    assert gateway_endpoint(service) == "http://chat-gateway.team.svc:8000"
    assert engines["metadata"]["name"] == "chat-engines"
    assert engines["spec"]["selector"] == {"rayloom.dev/service": "chat", "rayloom.dev/route": "true"}
    assert (engines["spec"]["clusterIP"], engines["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert [each["port"] for each in engines["spec"]["ports"]] == [8003]


@pytest.mark.parametrize(("replicas", "stay"), [(1, 0), (2, 1), (5, 1)])
def test_a_drain_of_a_node_leaves_a_gateway_unless_there_is_one_alone(replicas, stay):
    service = make_service(gateway={"replicas": replicas})
    budget = gateway_budget(service, service.spec.gateway)["spec"]

    assert budget["minAvailable"] == stay
    assert budget["selector"] == {"matchLabels": {"rayloom.dev/gateway": "chat"}}


def test_a_deleted_secret_comes_back_with_the_same_key():
    service = make_service(gateway={})
    first, again = (gateway_secret(service, b"k" * 16) for _ in range(2))
    other = gateway_secret(service, b"l" * 16)

    assert first == again
    assert first["data"]["key"] != other["data"]["key"]
    content = {name: base64.b64decode(text).decode() for name, text in first["data"].items()}
    assert len(content["key"]) == 64
    assert content["key"] != content["token"]


def test_a_recreated_service_has_another_secret():
    service = make_service(gateway={})
    meta = service.metadata.model_copy(update={"uid": "uid-2"})
    recreated = service.model_copy(update={"metadata": meta})
    names = {gateway_secret(each, b"k" * 16)["metadata"]["name"] for each in (service, recreated)}

    assert len(names) == 2
    assert all(name.startswith("chat-gateway-") for name in names)


def test_every_object_is_owned_by_the_service():
    service = make_service(gateway={})
    found = [
        build(),
        gateway_service(service),
        engines_service(service),
        gateway_budget(service, service.spec.gateway),
        gateway_secret(service, b"k" * 16),
    ]

    assert {each["metadata"]["ownerReferences"][0]["uid"] for each in found} == {"uid-1"}
    assert {each["metadata"]["labels"]["rayloom.dev/service"] for each in found} == {"chat"}
