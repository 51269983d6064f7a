"""A real API server accepts the examples of objects around a service, and an autoscaler can scale a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api import gateway_api
from api.namespaces import new_namespace
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import LLM, World

_EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
_SERVICE = "smollm2-two-replicas"


def _example(name: str, namespace: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((_EXAMPLES / f"{name}.yaml").read_text())
    document["metadata"]["namespace"] = namespace
    return document


@pytest.fixture
def namespace(world: World, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new namespace.

    The namespace is deleted after the test, because an autoscaler that is left in it would be evaluated every 15 s.
    """
    name = new_namespace(world, request.node.name)
    yield name
    world.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def with_gateway_api(world: World, kubectl: Kubectl) -> Iterator[None]:
    """The API server has the kind HTTPRoute during the test."""
    gateway_api.remove(kubectl)  # a killed run may have left it
    gateway_api.install(world, kubectl)
    yield
    gateway_api.remove(kubectl)


@pytest.mark.parametrize("name", ["hpa", "ingress-tls"])
def test_the_api_server_takes_it_without_a_warning_about_a_field(name: str, world: World, namespace: str) -> None:
    document = _example(name, namespace)
    plural = {"hpa": "autoscaling/v2", "ingress-tls": "networking.k8s.io/v1"}[name]
    kind = {"hpa": "horizontalpodautoscalers", "ingress-tls": "ingresses"}[name]
    path = f"/apis/{plural}/namespaces/{namespace}/{kind}"
    # Strict validation refuses unknown and duplicate fields.
    made = world.request("POST", path, document, fieldValidation="Strict")
    assert made["spec"].items() >= {each: made["spec"][each] for each in document["spec"]}.items()


def test_the_gateway_apis_definition_takes_the_route(world: World, with_gateway_api: None, namespace: str) -> None:
    path = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes"
    made = world.request("POST", path, _example("httproute", namespace), fieldValidation="Strict")
    assert made["spec"]["rules"][0]["timeouts"] == {"request": "0s"}


def test_the_hpas_controller_counts_a_services_engines_and_scales_it(
    world: World, operator: OperatorProcess, namespace: str
) -> None:
    world.create(_example(_SERVICE, namespace))
    world.wait_serving(namespace, _SERVICE)
    hpa = _example("hpa", namespace)
    # If a service has fewer than minReplicas, the HPA scales it up without metrics. This cluster has no metrics.
    hpa["spec"]["minReplicas"] = 3
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    world.request("POST", path, hpa)

    def hpa_status() -> Any:
        return world.request("GET", f"{path}/{_SERVICE}").get("status") or {}

    def story() -> str:
        return str(hpa_status())

    def replicas() -> Any:
        return world.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/{_SERVICE}")["spec"]["replicas"]

    def able_to_scale() -> list[str]:
        return [each["status"] for each in hpa_status().get("conditions", []) if each["type"] == "AbleToScale"]

    wait_until(lambda: replicas() == 3, "three replicas", story=story)
    # The controller scales first and writes its status afterwards. After 15 s it counts again, and finds three engines.
    wait_until(lambda: able_to_scale() == ["True"], "the controller's status", story=story)
    assert hpa_status()["currentReplicas"] in (2, 3)
    wait_until(lambda: len(world.objects(namespace, _SERVICE, "rayclusters")) == 3, "three engines", story=story)
