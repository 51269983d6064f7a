"""Mistakes in a manifest, or missing objects that it names.

A condition and an Event name the solution. In the meantime pods are not recreated in a loop. When the cause is removed,
the service serves without further changes. Three services have a mistake at the same time: a missing image, a missing
folder of a model, and too little memory on the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from clients.client_pod import Client
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, STATUS_SECONDS, Service, wait
from disruptions.mistakes import (
    FILLER,
    FOLDER,
    MISTAKES,
    PodCounter,
    image_on_the_nodes,
    remove_folder,
    services,
    too_little_memory,
)
from disruptions.model_folders import link_model
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from observers.kv_cache import expect_predicted_kv_cache

NAMES = sorted(MISTAKES)
ENOUGH = {"spec": {"engine": {"resources": {"limits": {"memory": "3Gi"}}}}}


@dataclass(frozen=True)
class Scene:
    services: dict[str, Service]
    pods: PodCounter


@pytest.fixture(scope="module")
def broken(operator: Kubectl) -> Iterator[Scene]:
    remove_folder()  # a killed run may have left it
    with new_namespace(operator, "mistakes") as namespace:
        client = Client.start(operator, namespace)
        pods = PodCounter(operator, namespace)
        try:
            operator.apply(*services(operator, namespace))
            yield Scene({name: Service(operator, client, namespace, name) for name in NAMES}, pods)
        finally:
            pods.close()


@pytest.fixture(scope="module")
def mended(broken: Scene, operator: Kubectl, cluster: Cluster) -> Iterator[Scene]:
    namespace = broken.services["room"].namespace
    try:
        with image_on_the_nodes(cluster):
            link_model(FOLDER)
            operator("delete", "pod", FILLER, "--namespace", namespace)
            yield broken
    finally:
        remove_folder()


@pytest.mark.parametrize("name", NAMES)
def test_a_condition_and_an_event_say_what_is_wrong_and_what_to_do(broken: Scene, name: str) -> None:
    service, mistake = broken.services[name], MISTAKES[name]

    def says_so() -> bool:
        found = service.condition("Available")
        is_meant = (found["status"], found["reason"]) == ("False", mistake.reason)
        return is_meant and all(words in found["message"] for words in mistake.said)

    wait(says_so, READY_SECONDS, service.story)
    for words in mistake.said:
        _wait_for_event(service, mistake.reason, words)


def _wait_for_event(service: Service, reason: str, words: str, seconds: float = STATUS_SECONDS) -> None:
    events = ("get", "events.events.k8s.io", "--namespace", service.namespace, "--field-selector")
    about = f"regarding.kind=LLMService,regarding.name={service.name},reason={reason},type=Warning"

    def is_there() -> bool:
        return any(words in each["note"] for each in service.kubectl.json(*events, about)["items"])

    wait(is_there, seconds, lambda: service.kubectl("get", "events", "--namespace", service.namespace))


@pytest.mark.parametrize("name", NAMES)
def test_it_serves_without_help_once_the_cause_is_gone(mended: Scene, name: str) -> None:
    service = mended.services[name]
    service.wait_available()
    status, body = service.chat(max_tokens=1)
    assert status == 200, body
    if name == "folder":
        assert len(service.engine_status()["ranks"]) == 1
        expect_predicted_kv_cache(service)


def test_no_pod_was_made_twice(mended: Scene) -> None:
    for service in mended.services.values():
        service.wait_available()
    assert mended.pods.by_service() == {name: mistake.num_pods for name, mistake in MISTAKES.items()}
    assert {each["restarts"] for s in mended.services.values() for each in s.get()["status"]["groups"]} == {0}


@pytest.mark.slow
def test_too_little_memory_is_named_engines_come_ever_later_and_a_higher_limit_serves(
    operator: Kubectl, client: Client, namespace: str
) -> None:
    service = Service(operator, client, namespace, "smollm2")
    pods = PodCounter(operator, namespace)
    try:
        operator.apply(*too_little_memory(namespace))
        _wait_for_event(service, "EngineFailed", "for want of memory", READY_SECONDS)
        _wait_for_event(service, "EngineFailed", "spec.engine.resources.limits.memory")

        def group() -> dict[str, Any]:
            found: dict[str, Any] = service.get()["status"]["groups"][0]
            return found

        # The first new replica is created at once, the second ten seconds after the end of the first.
        wait(
            lambda: group()["restarts"] == 2 and "nextRetryTime" in group(), READY_SECONDS, lambda: json.dumps(group())
        )
        assert group()["reason"] == "GroupBackOff"
        assert "for want of memory" in group()["failure"]["message"]
        assert pods.by_service() == {"smollm2": 4}
        operator("patch", "llm", service.name, "--namespace", namespace, "--type=merge", "--patch", json.dumps(ENOUGH))
        service.wait_available()
    finally:
        pods.close()
