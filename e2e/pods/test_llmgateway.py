"""One URL for two services: an LLMGateway under streams for both models and an alias of both models.

All tests share the LLMGateway and its services. These services have no gateway pods of their own. A request may fail
only if it was connected to a gateway pod that was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from clients.client_pod import Client
from clients.gateways import GatewayedService, ModelsGateway, uids
from clients.mixed_load import LATE_TOKENS, NUM_REQUESTS, run_mix
from clients.names_load import ALIAS, FIRST, SECOND, NamesLoad, undisturbed_names
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, STATUS_SECONDS, wait
from disruptions.gateway_scene import GatewayScene
from disruptions.gateway_under_load import GatewayRecord
from disruptions.rollout_under_load import rollable
from local_kubernetes.machine.kubectl import Kubectl

pytestmark = pytest.mark.slow
AUTOSCALING = {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 600}
IDLE_SECONDS = 10
LABEL = "public"
_AT_ONCE = ("--grace-period=0", "--force")
# Seconds from the end of a pod until the Service sends no more connections to it.
_ROUTE_SECONDS = 5.0
# Tokens of streams that run until the gateway pods have read a changed list of models.
_LONG = 480


@dataclass(frozen=True)
class Place:
    """The LLMGateway, its services, and its undisturbed answers."""

    gateway: ModelsGateway
    first: GatewayedService
    second: GatewayedService
    load: NamesLoad

    def select(self, service: GatewayedService, *, is_selected: bool) -> None:
        """Adds the label by which the LLMGateway selects the service, or removes it."""
        label = f"{LABEL}=yes" if is_selected else f"{LABEL}-"
        service.kubectl("label", "llm", service.name, "--namespace", service.namespace, label)


@pytest.fixture(scope="module")
def place(operator: Kubectl) -> Iterator[Place]:
    with new_namespace(operator, "llmgateway") as namespace:
        client = Client.start(operator, namespace)
        gateway = ModelsGateway(operator, client, namespace, "public")
        first, second = (GatewayedService(operator, client, namespace, f"public-{each}") for each in (FIRST, SECOND))
        # The two models answer differently, because their data types differ. So a request that reached the wrong model
        # is noticed.
        operator.apply(
            _service(first, FIRST, "float32"),
            # This service is autoscaled from the start, because the scaler must have read the load for a minute before
            # it removes an engine.
            _service(second, SECOND, "bfloat16", autoscaling=AUTOSCALING),
            _gateway(gateway, {first.name: 1, second.name: 1}),
        )
        wait(lambda: first.has(1) and second.has(1) and gateway.has_gateways(2), READY_SECONDS, gateway.story)
        gateway.wait_available()
        yield Place(gateway, first, second, undisturbed_names(gateway))


@pytest.fixture
def scene(place: Place, show_gateway: Callable[[GatewayRecord], None]) -> GatewayScene:
    return GatewayScene(place.gateway, place.load, show_gateway)


def test_streams_of_the_only_engine_of_a_model_wait_for_the_next_one(scene: GatewayScene, place: Place) -> None:
    (head,) = place.first.pods("head")
    scene.expect_unnoticed(
        "LLMGateway: the only head pod of a model is deleted, grace 0",
        lambda: place.first.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        GatewayScene(place.first, place.load, scene.show).is_recreated(head, 1),
        # No request is for the second model, so its service is idle in the next test.
        late_requests=place.load.first_alone(LATE_TOKENS),
    )


def test_a_request_wakes_a_service_without_engines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    gateway, second = place.gateway, place.second
    second.change(autoscaling={"idleSeconds": IDLE_SECONDS})
    idle_s = wait(lambda: _is_at_zero(second), READY_SECONDS, second.story)
    streams = run_mix(gateway, place.load.requests())
    second.change(autoscaling=AUTOSCALING)
    assert [problem for each in streams if (problem := place.load.problem_of(each))] == []
    held = [each for each in streams if each["cold_start"]]
    assert {each["served_by"] or each["model"] for each in held} == {SECOND}, "the other model has an engine"
    assert len(held) >= sum(each["model"] == SECOND for each in streams)
    with capsys.disabled():
        print(
            f"\n  zero after {idle_s:.1f} s (idleSeconds {IDLE_SECONDS}); {len(held)} of {len(streams)} "
            f"streams waited, and had their first token after {_first_token_s(held):.1f} s; the others after "
            f"{_first_token_s([each for each in streams if not each['cold_start']]):.1f} s"
        )


def test_the_death_of_a_gateway_ends_only_its_connections_and_their_repeats_get_the_same_answers(
    scene: GatewayScene, place: Place
) -> None:
    gateway = place.gateway
    victim, survivor = gateway.gateways()
    urls = [f"http://{pod['status']['podIP']}:8000" for pod in (victim, survivor)]
    seen = scene.expect_unnoticed(
        "LLMGateway: a gateway is killed (its clients repeat)",
        lambda: gateway.delete_pod(victim["metadata"]["name"], *_AT_ONCE),
        lambda: gateway.has_gateways(2, but_not=uids([victim])),
        urls=urls * (NUM_REQUESTS // 2),
        repeat_url=gateway.url,
    )
    first = [stream for stream in seen.repeated if not stream["is_late"]]
    assert len(first) == NUM_REQUESTS // 2, "every stream of the killed gateway was repeated"
    assert {stream["url"] for stream in first} == {urls[0]}, "the other gateway's streams go on"
    # Later connections may break only while the Service still has the killed pod.
    known_at = seen.timeline.began_at + _ROUTE_SECONDS
    assert not [stream for stream in seen.repeated if stream["began"] > known_at]


def test_a_service_leaves_and_comes_back_and_no_stream_ends(
    scene: GatewayScene, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway, moments = place.gateway, {"removed": 0.0, "added": 0.0}

    def is_over() -> bool:
        if not moments["removed"] and gateway.has_names(ALIAS, FIRST):
            moments["removed"] = time.time()
            body = {"model": SECOND, "prompt": "Hello", "max_tokens": 1}
            status, text = gateway.client.request(f"{gateway.url}/v1/completions", body)
            assert status == 404 and "model_not_found" in text, text
            place.select(place.second, is_selected=True)
        elif moments["removed"] and gateway.has_names(ALIAS, FIRST, SECOND):
            moments["added"] = time.time()
        return bool(moments["added"])

    seen = scene.expect_unnoticed(
        "LLMGateway: a service is removed and added",
        lambda: place.select(place.second, is_selected=False),
        is_over,
        requests=place.load.long_for_second(_LONG),
        late_requests=place.load.without_second(LATE_TOKENS),
        seconds=400.0,
    )
    held = [each for each in seen.streams if each["model"] == SECOND and each["ended"] > moments["removed"]]
    removed_s, added_s = (seen.timeline.seconds(moments[name]) for name in ("removed", "added"))
    with capsys.disabled():
        print(
            f"\n  the gateway pods have read the removal after {removed_s:.1f} s, the addition after {added_s:.1f} s; "
            f"{len(held)} streams of the removed model ran on"
        )
    assert held, "the streams of the removed model have ended before"
    wait(lambda: _are_current(gateway), STATUS_SECONDS, gateway.story)


def _first_token_s(streams: list[dict[str, Any]]) -> float:
    """The longest time to a first token."""
    return max(float(each["times"][0] - each["began"]) for each in streams)


def _are_current(gateway: ModelsGateway) -> bool:
    """True when the status says that both gateway pods have read the present list of models."""
    status = gateway.get()["status"]
    read = [(each["models"], each["modelsHash"]) for each in status["pods"]]
    return read == [("Current", status["modelsHash"])] * 2


def _is_at_zero(service: GatewayedService) -> bool:
    return service.condition("Available")["reason"] == "ScaledToZero" and not service.pods("head")


def _service(service: GatewayedService, served_name: str, dtype: str, **spec: Any) -> dict[str, Any]:
    document = rollable(service.namespace, 5, 5, replicas=1, gateway={"replicas": 0}, **spec)
    document["metadata"] |= {"name": service.name, "labels": {LABEL: "yes"}}
    document["spec"]["model"] |= {"servedName": served_name, "dtype": dtype}
    return document


def _gateway(gateway: ModelsGateway, weights: dict[str, int]) -> dict[str, Any]:
    targets = [{"service": service, "weight": weight} for service, weight in weights.items()]
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMGateway",
        "metadata": {"name": gateway.name, "namespace": gateway.namespace},
        "spec": {
            "services": {"matchLabels": {LABEL: "yes"}},
            "aliases": [{"name": ALIAS, "targets": targets}],
        },
    }
