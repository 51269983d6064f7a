"""Queues: labels reach RayClusters, and what KubeRay suspends is said to wait. Kueue itself does not run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from standins.client import MERGE
from standins.operators import OperatorProcess, wait_until
from standins.pod_status import Play
from standins.world import LLM, World

Make = Callable[..., dict[str, Any]]
_QUEUE = "kueue.x-k8s.io/queue-name"


def _clusters(world: World, namespace: str) -> list[dict[str, Any]]:
    return list(world.objects(namespace, "chat", "rayclusters").values())


def test_engines_are_made_in_the_queue_of_their_service_and_a_restart_moves_them(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    def labelled(queue: str, **spec: Any) -> dict[str, Any]:
        found = manifest(rollout={"analysis": {"holdSeconds": 0}}, **spec)
        found["metadata"]["labels"] = {_QUEUE: queue, "team": "a"}
        return found

    def queues() -> set[str]:
        return {each["metadata"]["labels"].get(_QUEUE, "") for each in _clusters(world, namespace)}

    world.create(labelled("small"))
    world.wait_serving(namespace, "chat")
    (before,) = _clusters(world, namespace)
    assert queues() == {"small"}
    assert "team" not in before["metadata"]["labels"]
    # A label is in no revision. The restart shows that the operator has seen it.
    world.create(labelled("large", restartedAt="2026-11-24T08:00:00Z"))
    wait_until(lambda: queues() == {"large"}, "the engine to be in the other queue", 60, world.story)
    world.wait_serving(namespace, "chat")
    assert before["metadata"]["uid"] not in {each["metadata"]["uid"] for each in _clusters(world, namespace)}


def test_a_raycluster_that_is_suspended_is_said_to_wait_for_its_queue_and_goes_on_when_it_is_admitted(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    # Kueue suspends before there is a pod. Here the first ones wait, so that the RayCluster never was whole.
    world.play(namespace, "chat", "head", Play(waiting=("ContainerCreating", "")))
    world.create(manifest())
    wait_until(lambda: len(_clusters(world, namespace)) == 1, "a RayCluster", 30, world.story)
    (cluster,) = _clusters(world, namespace)
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{cluster['metadata']['name']}"
    world.request("PATCH", path, {"spec": {"suspend": True}}, content_type=MERGE)

    def says() -> str:
        return str(world.condition(namespace, "chat", "Available").get("message", ""))

    wait_until(lambda: "is suspended" in says(), "the status to say it", 30, says)
    assert world.condition(namespace, "chat", "Available")["reason"] == "PodsPending"
    world.play(namespace, "chat", "head", Play())
    world.request("PATCH", path, {"spec": {"suspend": False}}, content_type=MERGE)
    world.wait_serving(namespace, "chat", 60)
    (after,) = _clusters(world, namespace)
    assert after["metadata"]["uid"] == cluster["metadata"]["uid"]
    assert (
        world.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/chat")["status"]["groups"][0]["restarts"] == 0
    )
