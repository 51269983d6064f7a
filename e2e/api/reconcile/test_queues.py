"""Queues: labels reach RayClusters, and the status names a suspended RayCluster. Kueue itself does not run here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import ENGINE_IMAGE, LLM, World
from simulated_nodes.api_client import MERGE

Make = Callable[..., dict[str, Any]]
_QUEUE = "kueue.x-k8s.io/queue-name"

# Kueue's webhook suspends a RayCluster in the request that creates it.
_SUSPENDED = """
import sys
from rayloom_operator.objects import ray_cluster
built = ray_cluster.ray_cluster
def suspended(*args, **options):
    cluster = built(*args, **options)
    cluster["spec"]["suspend"] = True
    return cluster
ray_cluster.ray_cluster = suspended
from rayloom_operator.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def queueing_operator(world: World) -> Iterator[None]:
    """Runs a single operator, whose RayClusters are created suspended, as with Kueue's webhook."""
    world.stop_operators()
    world.take_lease()
    world.start_operator(f"--engine-image={ENGINE_IMAGE}", command=(sys.executable, "-c", _SUSPENDED))
    yield
    world.stop_operators()
    world.take_lease()


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
    # Labels are not part of a revision. The restart proves that the operator has read the new label.
    world.create(labelled("large", restartedAt="2026-11-24T08:00:00Z"))
    wait_until(lambda: queues() == {"large"}, "the engine to be in the other queue", story=world.story)
    world.wait_serving(namespace, "chat")
    assert before["metadata"]["uid"] not in {each["metadata"]["uid"] for each in _clusters(world, namespace)}


def test_a_suspended_raycluster_is_pending_in_the_status_and_serves_once_it_is_admitted(
    world: World, queueing_operator: None, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    wait_until(lambda: len(_clusters(world, namespace)) == 1, "a RayCluster", story=world.story)
    (cluster,) = _clusters(world, namespace)

    world.wait(namespace, "chat", "Available", "PodsPending", "is suspended")
    assert world.pods(namespace, "chat") == []
    # Kueue admits a RayCluster by this patch.
    path = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{cluster['metadata']['name']}"
    world.request("PATCH", path, {"spec": {"suspend": False}}, content_type=MERGE)
    world.wait_serving(namespace, "chat")
    (after,) = _clusters(world, namespace)
    assert after["metadata"]["uid"] == cluster["metadata"]["uid"]
    status = world.request("GET", f"{LLM}/namespaces/{namespace}/llmservices/chat")["status"]
    assert status["groups"][0]["restarts"] == 0
