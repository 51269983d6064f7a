"""A node drain: the operator first moves engine replicas off the node, and only then allows evictions.

These tests are not in test_rolls.py, because a cordoned node affects all services.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.rollouts.rolling import ANALYSIS, Service
from operator_processes.process import OperatorProcess
from real_api_server.world import World
from simulated_nodes.api_client import Document
from simulated_nodes.nodes import NODES


@pytest.fixture
def nodes(world: World) -> Iterator[None]:
    """The nodes, schedulable again after the test."""
    yield
    world.uncordon(*NODES)


def _pods(service: Service, kind: str) -> list[Document]:
    pods = service.world.pods(*service.key)
    return [each for each in pods if each["metadata"]["labels"]["ray.io/node-type"] == kind]


@pytest.mark.parametrize("kind", ["head", "worker"])
def test_an_engine_on_a_node_that_is_drained_is_moved_before_it_may_be_evicted(
    world: World, operator: OperatorProcess, namespace: str, nodes: None, kind: str
) -> None:
    service = Service(world, namespace, "chat", operator)
    service.start()
    (old,), (pod,) = service.clusters, _pods(service, kind)
    engine = service.engine(old)

    with service.traffic() as traffic:
        # `kubectl drain` sends evictions right after the cordon, before the operator can react.
        world.cordon(pod["spec"]["nodeName"])
        assert not world.evict(pod)
        # The condition may already have a later reason, so this wait reads its history.
        world.wait_seen(*service.key, "Progressing", "Moving")
        service.wait_until(lambda: world.evict(pod), "the eviction to go through")
        # The eviction has succeeded. It fails no request: no client found the engine when its drain began, and the
        # engine runs no request.
        assert engine.found_at_drain == ()
        assert {method for _, method in engine.drains} == {"POST"}
        assert engine.num_running == 0
        service.wait_until(lambda: old not in service.clusters, "the old engine's end")
        service.wait_complete()
    assert pod["spec"]["nodeName"] not in {each["spec"]["nodeName"] for each in world.pods(*service.key)}
    assert (service.most, service.num_ever) == (2, 2)
    assert traffic.fewest == 1
    assert traffic.failures == []
    assert service.status["groups"][0]["restarts"] == 0


def test_without_room_elsewhere_evictions_wait(
    world: World, operator: OperatorProcess, namespace: str, nodes: None
) -> None:
    service = Service(world, namespace, "chat", operator)
    service.start(replicas=2)
    pods, heads = service.pods, _pods(service, "head")
    with service.traffic() as traffic:
        for name in NODES:
            world.cordon(name)
        service.wait("Progressing", "WaitingForCapacity")
        assert [world.evict(head) for head in heads] == [False, False]
        world.uncordon(*NODES)
        service.wait_complete()
    assert (service.pods, service.most) == (pods, 3)
    assert traffic.fewest == 2
    assert traffic.failures == []


def test_without_surge_nothing_is_moved_and_one_at_a_time_may_be_evicted(
    world: World, operator: OperatorProcess, namespace: str, nodes: None
) -> None:
    service = Service(world, namespace, "chat", operator)
    service.start(replicas=2, rollout={"analysis": ANALYSIS, "maxSurge": 0, "maxUnavailable": 1})
    first, second = _pods(service, "head")
    old = first["metadata"]["labels"]["ray.io/cluster"]
    world.cordon(first["spec"]["nodeName"])
    service.wait_until(lambda: world.evict(first), "the first eviction to go through")
    assert not world.evict(second)
    world.uncordon(first["spec"]["nodeName"])
    service.wait_until(lambda: old not in service.clusters, "its engine to be made anew")
    service.wait_until(lambda: service.status["availableReplicas"] == 2, "two that serve again")
    assert service.most == 2
