"""No stream dies with a pod: gateways in front of two engines, then of one, under streams of every kind.

All tests share one service. A request may fail only if it was connected to a gateway that was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from clients.client_pod import Client
from clients.gateways import GatewayedService, uids
from clients.mixed_load import NUM_REQUESTS, MixedLoad, undisturbed_mix
from clients.namespaces import new_namespace
from clients.service import wait
from disruptions.gateway_under_load import GatewayRecord, disturb_gateway
from disruptions.rollout_under_load import is_rolled, rollable
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl

HOLD_SECONDS, MIN_REQUESTS = 5, 5
_AT_ONCE = ("--grace-period=0", "--force")
# Seconds from the end of a pod until the Service sends no more connections to it.
_ROUTE_SECONDS = 5.0
_NODE_DRAIN_SECONDS = 240


@dataclass(frozen=True)
class GatewayScene:
    """A service with its undisturbed answers."""

    service: GatewayedService
    load: MixedLoad
    show: Callable[[GatewayRecord], None]

    def disturb(
        self, what: str, strike: Callable[[], object], is_over: Callable[[], bool], **settings: Any
    ) -> GatewayRecord:
        seen = disturb_gateway(self.service, self.load, what, strike, is_over=is_over, **settings)
        self.show(seen)
        return seen

    def expect_unnoticed(self, *arguments: Any, **settings: Any) -> GatewayRecord:
        """Disturbs the service, and expects that no request failed and that no answer changed."""
        seen = self.disturb(*arguments, **settings)
        assert [failure.what for failure in seen.failures] == []
        return seen

    def is_recreated(self, head: dict[str, Any], number: int) -> Callable[[], bool]:
        """A predicate: this number of engines serve, and none of them has this head pod."""
        uid = head["metadata"]["uid"]
        return lambda: uid not in uids(self.service.pods("head")) and self.service.has(number)


@pytest.fixture(scope="module")
def pair(operator: Kubectl) -> Iterator[tuple[GatewayedService, MixedLoad]]:
    with new_namespace(operator, "gateway") as namespace:
        service = GatewayedService(operator, Client.start(operator, namespace), namespace, "smollm2")
        spec = {"replicas": 2, "gateway": {"replicas": 2}}
        operator.apply(rollable(namespace, HOLD_SECONDS, MIN_REQUESTS, **spec))
        wait(lambda: service.has(2) and service.has_gateways(2), 180.0, service.story)
        service.wait_available()
        yield service, undisturbed_mix(service)


@pytest.fixture
def scene(pair: tuple[GatewayedService, MixedLoad], show_gateway: Callable[[GatewayRecord], None]) -> GatewayScene:
    return GatewayScene(*pair, show_gateway)


def test_streams_of_a_head_pod_that_is_deleted_at_once_continue_on_the_other_engine(scene: GatewayScene) -> None:
    service = scene.service
    head = service.pods("head")[0]
    scene.expect_unnoticed(
        "a head pod is deleted, grace 0",
        lambda: service.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        scene.is_recreated(head, 2),
    )


@pytest.mark.slow
def test_streams_of_an_engine_that_drains_move_to_the_other_one(scene: GatewayScene) -> None:
    service = scene.service
    head = service.pods("head")[0]
    scene.expect_unnoticed(
        "an engine drains (its head pod is deleted)",
        lambda: service.delete_pod(head["metadata"]["name"]),
        scene.is_recreated(head, 2),
    )


@pytest.mark.slow
def test_gateways_are_replaced_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    old = uids(service.gateways())
    restart = ("rollout", "restart", f"deployment/{service.name}-gateway", "--namespace", service.namespace)
    scene.expect_unnoticed(
        "gateways are restarted", lambda: service.kubectl(*restart), lambda: service.has_gateways(2, but_not=old)
    )


@pytest.mark.slow
def test_the_death_of_a_gateway_ends_only_its_own_connections(scene: GatewayScene) -> None:
    service = scene.service
    victim, survivor = service.gateways()
    urls = [f"http://{pod['status']['podIP']}:8000" for pod in (victim, survivor)]
    seen = scene.disturb(
        "a gateway is killed (its streams end)",
        lambda: service.delete_pod(victim["metadata"]["name"], *_AT_ONCE),
        lambda: service.has_gateways(2, but_not=uids([victim])),
        urls=urls * (NUM_REQUESTS // 2),
    )
    failed = [failure.stream for failure in seen.failures]
    assert len([stream for stream in failed if stream["url"] == urls[0]]) == NUM_REQUESTS // 2
    assert not [stream for stream in failed if stream["url"] == urls[1]], "the other gateway's streams go on"
    # Later requests may fail only while the Service still has the killed pod.
    known_at = seen.timeline.began_at + _ROUTE_SECONDS
    assert not [stream for stream in failed if stream["began"] > known_at]
    assert not [failure.what for failure in seen.failures if failure.what.startswith(("HTTP", "error", "request"))]


@pytest.mark.slow
def test_an_argument_is_rolled_out_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    old = service.get()["status"]["currentRevision"]
    scene.expect_unnoticed(
        "an argument is rolled out",
        lambda: service.change(engine={"args": {"threads": 1, "maxNumSeqs": 128}}),
        is_rolled(service, old),
        seconds=360.0,
    )


@pytest.mark.slow
def test_a_drained_node_costs_nobody_anything(scene: GatewayScene, cluster: Cluster) -> None:
    service = scene.service
    client = service.kubectl.json("get", "pod", service.client.name, "--namespace", service.namespace)
    (node,) = set(cluster.node_names()) - {client["spec"]["nodeName"]}
    limit = f"--timeout={_NODE_DRAIN_SECONDS}s"
    command = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", limit)
    drains: list[Future[str]] = []

    def is_over() -> bool:
        # Raises the error of a failed drain.
        return drains[0].done() and bool(drains[0].result()) and service.has(2) and service.has_gateways(2)

    with ThreadPoolExecutor(1) as thread:
        try:
            scene.expect_unnoticed(
                "a node is drained",
                lambda: drains.append(thread.submit(service.kubectl, *command, timeout_s=_NODE_DRAIN_SECONDS + 30)),
                is_over,
                seconds=_NODE_DRAIN_SECONDS + 60.0,
            )
        finally:
            service.kubectl("uncordon", node)


@pytest.mark.slow
def test_one_of_two_engines_is_removed_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    scene.expect_unnoticed("scaled from 2 to 1", lambda: service.scale(1), lambda: service.has(1))


@pytest.mark.slow
def test_streams_of_the_only_engine_wait_for_the_next_one(scene: GatewayScene) -> None:
    service = scene.service
    if not service.has(1):
        service.scale(1)
        wait(lambda: service.has(1), 120.0, service.story)
    (head,) = service.pods("head")
    seen = scene.expect_unnoticed(
        "the only head pod is deleted, grace 0",
        lambda: service.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        scene.is_recreated(head, 1),
    )
    assert seen.pause_s > 2.0, "no engine served meanwhile"
