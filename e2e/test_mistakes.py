"""What goes wrong by a manifest, or because something that it names is not there: a condition and an Event say what to
do, pods are not made over and over meanwhile, and once the cause is gone the service serves without anybody's help.

Three services have a mistake each, all at the same time: an image, a model's folder and room that are not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from mistakes import FILLER, FOLDER, MISTAKES, PodCounter, image_on_the_nodes, remove_folder, services
from models import link_model
from service import Service, wait

NAMES = sorted(MISTAKES)


@dataclass(frozen=True)
class Scene:
    services: dict[str, Service]
    pods: PodCounter


@pytest.fixture(scope="module")
def broken(operator: Kubectl) -> Iterator[Scene]:
    remove_folder()  # of a run that was killed
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
        return service.condition("Available")["reason"] == mistake.reason

    wait(says_so, 60.0, lambda: json.dumps(service.get().get("status"), indent=1))
    available = service.condition("Available")
    assert available["status"] == "False"
    events = ("get", "events.events.k8s.io", "--namespace", service.namespace, "--field-selector")

    def notes() -> list[str]:
        about = f"regarding.kind=LLMService,regarding.name={name},reason={mistake.reason},type=Warning"
        return [each["note"] for each in service.kubectl.json(*events, about)["items"]]

    wait(lambda: bool(notes()), 10.0, lambda: service.kubectl("get", "events", "--namespace", service.namespace))
    for words in mistake.said:
        assert words in available["message"]
        assert any(words in note for note in notes())


@pytest.mark.parametrize("name", NAMES)
def test_it_serves_without_help_once_the_cause_is_gone(mended: Scene, name: str) -> None:
    service = mended.services[name]
    service.wait_available(150.0)
    status, body = service.chat(max_tokens=1)
    assert status == 200, body


def test_no_pod_was_made_twice(mended: Scene) -> None:
    for service in mended.services.values():
        service.wait_available(150.0)
    assert mended.pods.by_service() == {name: mistake.num_pods for name, mistake in MISTAKES.items()}
    assert {each["restarts"] for s in mended.services.values() for each in s.get()["status"]["groups"]} == {0}
