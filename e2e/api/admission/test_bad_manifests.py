"""The API server, or else the operator, refuses mistakes in a manifest with a message that names the solution."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from api.admission.bad_manifests import AT_ADMISSION
from api.admission.bad_models import MODELS
from api.admission.bad_routes import ROUTES
from api.namespaces import forbid_pods, llm_service
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError
from operator_processes.process import OperatorProcess, wait_until
from rayloom_operator.api.status import Reason
from real_api_server.world import LLM, World
from simulated_nodes.api_client import ApiError

Make = Callable[..., dict[str, Any]]


_ROWS = AT_ADMISSION + MODELS + ROUTES


@pytest.mark.parametrize(("wrong", "document", "sentence"), _ROWS, ids=[row[0] for row in _ROWS])
def test_the_api_server_refuses_it_at_once(
    wrong: str, document: dict[str, Any], sentence: str, world: World, operator: OperatorProcess
) -> None:
    manifest = llm_service("default", "bad")
    del manifest["spec"]
    manifest |= {key: value for key, value in document.items() if key != "metadata"}
    manifest["metadata"] |= document.get("metadata", {})
    with pytest.raises(ApiError) as refused:
        # For a new object, `kubectl apply` sends this request.
        world.request("POST", f"{LLM}/namespaces/default/llmservices", manifest, fieldValidation="Strict")
    assert sentence in str(refused.value)
    assert operator.is_alive


def test_the_table_is_long_enough() -> None:
    assert len(AT_ADMISSION) >= 40
    assert len({wrong for wrong, _, _ in _ROWS}) == len(_ROWS)


def test_kubectl_prints_the_same_sentence(kubectl: Kubectl, manifest: Make) -> None:
    document = manifest(model={"source": "s3://bucket/model"})
    with pytest.raises(ClusterError, match="use one of hf://ORG/NAME"):
        kubectl("apply", "--filename", "-", stdin=json.dumps(document).encode())
    misspelt = manifest(paralelism={"tensor": 2})
    with pytest.raises(ClusterError, match=r'unknown field "spec\.paralelism"'):
        kubectl("apply", "--filename", "-", stdin=json.dumps(misspelt).encode())


REFUSED_LATER = {
    "a-quota": ({}, "exceeded quota"),
    "request-above-limit": (
        {"engine": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}},
        "must be less than or equal to cpu limit",
    ),
    "no-such-resource": ({"engine": {"resources": {"requests": {"a b": "2"}}}}, "a b"),
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_a_mistake_that_only_a_pod_shows_reaches_the_status_and_costs_few_requests(
    name: str, world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    spec, sentence = REFUSED_LATER[name]
    if name == "a-quota":
        forbid_pods(world, namespace)
    world.create(manifest(name, **spec))
    wait_until(
        lambda: sentence in world.condition(namespace, name, "Available").get("message", ""),
        f"{sentence!r} in the status",
        story=lambda: f"{world.services.get((namespace, name), {}).get('status')}\n{world.story()}",
    )
    # Back-off bounds the number of reconciles, so requests are few.
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3.0, "three seconds to pass")
    asked = [each for each in operator.proxy.requests(namespace, began) if each.at < began + 3.0]
    message = world.condition(namespace, name, "Available")["message"]
    assert len(asked) <= 12, (message, [(each.method, each.path) for each in asked])


def test_a_good_spec_after_a_refused_one_serves(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    service = {"metadata": {"name": "chat"}, "spec": {"ports": [{"port": 80}]}}
    world.request("POST", f"/api/v1/namespaces/{namespace}/services", service)
    world.create(manifest())
    world.wait(namespace, "chat", "Accepted", Reason.APPLY_REFUSED)
    world.delete(f"/api/v1/namespaces/{namespace}/services/chat")
    world.create(manifest(drainSeconds=1))
    world.wait_serving(namespace, "chat")
