"""A service on real pods, with a model from a PersistentVolumeClaim, three ranks in a pod, and pod templates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.namespaces import new_namespace
from clients.service import ROOT, Service, manifest
from disruptions.model_folders import claim_on_the_nodes
from local_kubernetes.machine.kubectl import Kubectl
from observers.container_view import containers_of, is_restricted
from observers.kv_cache import expect_predicted_kv_cache

_HEAD_LIMITS = {"cpu": "2", "memory": "2Gi"}
_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAYLOOM_ALIVE_FILE": "/nowhere", "FROM_SETTINGS": "yes"}
_FROM_SECRET = {"name": "PASSPHRASE", "valueFrom": {"secretKeyRef": {"name": "template", "key": "passphrase"}}}


def _template(*containers: str, **fields: Any) -> dict[str, Any]:
    mount = {"name": "settings", "mountPath": "/etc/settings", "readOnly": True}
    common = {"env": [_FROM_SECRET], "envFrom": [{"configMapRef": {"name": "template"}}], "volumeMounts": [mount]}
    return {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/of-the-template": "yes"}},
        "spec": {
            "volumes": [{"name": "settings", "configMap": {"name": "template"}}],
            "containers": [{"name": name, **common, **fields} for name in containers],
        },
    }


def _templates_and_what_they_name(namespace: str) -> tuple[dict[str, Any], ...]:
    """The pod templates of a service, then a Secret and a ConfigMap."""
    metadata = {"name": "template", "namespace": namespace}
    head = _template("ray-head", "engine", resources={"limits": _HEAD_LIMITS})
    return (
        {"head": head, "worker": _template("ray-worker")},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"passphrase": "open sesame"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _SETTINGS},
    )


@pytest.fixture(scope="module")
def service(operator: Kubectl) -> Iterator[Service]:
    """The service of pvc-model.yaml, with three ranks and pod templates."""
    path = ROOT / "examples" / "pvc-model.yaml"
    with new_namespace(operator, "claim") as namespace, claim_on_the_nodes(operator, namespace, "models", "smollm2"):
        templates, *named = _templates_and_what_they_name(namespace)
        found = manifest(path, namespace, parallelism={"tensor": 3}, podTemplate=templates)
        found["spec"]["model"]["dtype"] = "float32"
        operator.apply(*named, found)
        yield Service(operator, Client.start(operator, namespace), namespace, found["metadata"]["name"])


def test_three_ranks_of_one_pod_serve_a_model_of_a_claim_and_say_what_one_rank_says_here(
    operator: Kubectl, service: Service, expected: list[str]
) -> None:
    service.wait_available()
    assert service.tokens() == expected
    ranks = service.engine_status()["ranks"]
    (pod,) = service.pods("worker")
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [
        (number, pod["metadata"]["name"]) for number in range(3)
    ]
    assert service.get()["status"]["shape"] == "TP3xPP1"
    expect_predicted_kv_cache(service)
    jobs = operator.json("get", "pods", "--namespace", service.namespace, "--selector", "job-name")["items"]
    assert jobs and all(is_restricted(container) for pod in jobs for container in containers_of(pod))


def test_what_a_pod_template_says_is_so_inside_the_containers(operator: Kubectl, service: Service) -> None:
    service.wait_available()
    (head,), (worker,) = service.pods("head"), service.pods("worker")
    for pod, containers in ((head, ("ray-head", "engine")), (worker, ("ray-worker",))):
        assert pod["metadata"]["labels"]["team"] == "search"
        assert pod["metadata"]["annotations"]["example.com/of-the-template"] == "yes"
        for name in containers:
            command = ("exec", "--namespace", service.namespace, pod["metadata"]["name"], "--container", name, "--")
            variables = dict(line.split("=", 1) for line in operator(*command, "env").splitlines() if "=" in line)
            assert (variables["PASSPHRASE"], variables["FROM_SETTINGS"]) == ("open sesame", "yes")
            # The ConfigMap has other values for these variables, and the operator's values must win.
            assert variables["RAY_AUTH_MODE"] == "token" and variables["RAYLOOM_ALIVE_FILE"] != "/nowhere"
            assert operator(*command, "cat", "/etc/settings/FROM_SETTINGS") == "yes"
    limits = {each["name"]: each["resources"]["limits"] for each in head["spec"]["containers"]}
    assert limits == {"ray-head": _HEAD_LIMITS, "engine": _HEAD_LIMITS}
