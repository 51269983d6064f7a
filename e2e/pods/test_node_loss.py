"""Lost nodes and cut links under running streams. The tests cause one loss after the other in one service.

The head pod, the client and the operator are on one node, a worker pod on the other. For the loss of the head's node,
client and operator are on the other node.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import StreamTokens, undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, Service, is_ready, wait
from disruptions.fault_under_load import FaultRecord, disturb
from disruptions.nodes import move_operator_off
from disruptions.scene import Scene, breakable
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from observers.timeline import Timeline

pytestmark = pytest.mark.slow

CUT_SECONDS = 20.0
# Errors that a client may get from a pod on a lost node: the connection fails, or no data arrives on it.
CUT = re.compile(r"(Connection|Server|Socket)?TimeoutError|ClientConnectorError|ServerDisconnectedError|ClientOSError")


@dataclass(frozen=True)
class Split:
    service: Service
    expected: StreamTokens
    head_node: str
    other_node: str


@pytest.fixture(scope="module")
def split(operator: Kubectl, cluster: Cluster) -> Iterator[Split]:
    with new_namespace(operator, "nodes") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2-pp2")
        operator.apply(breakable(namespace))
        service.wait_available()
        head_node = service.pods("head")[0]["spec"]["nodeName"]
        (other_node,) = set(cluster.node_names()) - {head_node}
        service.client = Client.start(operator, namespace, "beside-the-head", head_node)
        move_operator_off(operator, other_node)
        try:
            yield Split(service, undisturbed(service), head_node, other_node)
        finally:
            for node in cluster.node_names():
                cluster.start_node(node)


def test_a_link_that_is_cut_for_a_while_costs_a_pause(
    cluster: Cluster, split: Split, show: Callable[[str, FaultRecord], None]
) -> None:
    scene = Scene(split.service, split.expected, show)
    before = split.service.engine_status()
    assert split.other_node in {rank["node"] for rank in before["ranks"]}

    def mend(timeline: Timeline) -> None:
        time.sleep(max(0.0, timeline.began_at + CUT_SECONDS - time.time()))  # seconds for which the link is cut
        cluster.mend_link(split.other_node)
        timeline.note(time.time(), "fault", "the link is mended")

    seen = scene.break_it(
        f"the link of a worker's node is cut for {CUT_SECONDS:.0f} s",
        lambda: cluster.cut_link(split.other_node),
        mend=mend,
        is_over=scene.is_serving_after(before["epoch"]),
    )
    assert seen.timeline.said("Degraded", "True", split.other_node) is not None


def test_a_lost_worker_node_costs_a_pause_and_is_named(
    cluster: Cluster, split: Split, show: Callable[[str, FaultRecord], None]
) -> None:
    service, lost = split.service, split.other_node
    before = _spread(split)
    (kept,) = [rank for rank in before["ranks"] if rank["node"] == split.head_node]
    scene = Scene(service, split.expected, show)
    try:
        seen = scene.break_it(
            "a worker's node is lost",
            lambda: cluster.stop_node(lost),
            is_over=scene.is_serving_after(before["epoch"]),
            seconds=READY_SECONDS,
        )
        unready_s = seen.timeline.first("node", f"{lost} is not Ready")
        assert unready_s is not None and seen.tokens_s - unready_s < 60.0 + _load_seconds(service)
        assert seen.timeline.said("Degraded", "True", lost) is not None
        after = service.engine_status()
        assert {rank["node"] for rank in after["ranks"]} == {split.head_node}
        survivor = after["ranks"][kept["rank"]]
        assert (survivor["host"], survivor["pid"]) == (kept["host"], kept["pid"]), "the other rank lives on"
        assert not _pods_on(service, lost), "no pod hangs on the lost node"
    finally:
        cluster.start_node(lost)
    wait(lambda: service.condition("Degraded")["status"] == "False", READY_SECONDS, service.story)
    assert service.is_available()


def test_after_the_loss_of_the_heads_node_a_new_engine_serves(
    cluster: Cluster, operator: Kubectl, split: Split, show: Callable[[str, FaultRecord], None]
) -> None:
    service, lost = split.service, split.head_node
    service.client = Client.start(operator, service.namespace, "beside-a-worker", split.other_node)
    move_operator_off(operator, lost)
    service.wait_available()
    old = service.pods("head")[0]["metadata"]["uid"]

    def is_replaced() -> bool:
        heads = [pod for pod in service.pods("head") if "deletionTimestamp" not in pod["metadata"]]
        return bool(heads) and all(pod["metadata"]["uid"] != old for pod in heads)

    try:
        seen = disturb(
            service,
            split.expected,
            "the head's node is lost",
            lambda: cluster.stop_node(lost),
            is_over=is_replaced,
            seconds=READY_SECONDS,
            late_every_s=0,
            probe_timeout_s=5.0,
        )
        show("the head's node is lost (its streams end)", seen)
        assert seen.untrue_times == []
        # Streams end with their pod, and new requests get no connection. No answer is wrong, and none is an HTTP error.
        assert len(seen.failures) == seen.num_requests
        for failure in (*seen.failures, *seen.probe_failures):
            assert CUT.match(failure), failure
        unready_s = seen.timeline.first("node", f"{lost} is not Ready")
        assert unready_s is not None and seen.available_s is not None
        assert seen.available_s - unready_s < 90.0 + _load_seconds(service)
        assert seen.timeline.said("Available", "False", lost) is not None
        assert undisturbed(service) == split.expected
        assert not _pods_on(service, lost), "no pod hangs on the lost node"
    finally:
        cluster.start_node(lost)
    wait(lambda: service.condition("Degraded")["status"] == "False", READY_SECONDS, service.story)
    assert service.is_available()


def _spread(split: Split) -> dict[str, Any]:
    """/status of the engine, once it has a rank on each node again. A long cut may have moved the other node's pod."""
    service = split.service
    wait(
        lambda: _is_node_ready(service.kubectl, split.other_node),
        READY_SECONDS,
        lambda: service.kubectl("get", "nodes"),
    )
    service.wait_available()
    ranks = service.engine_status()["ranks"]
    if split.other_node not in {rank["node"] for rank in ranks}:
        service.delete_pod(ranks[0]["host"])

    def is_spread() -> bool:
        status = service.engine_status()
        return status["state"] == "serving" and len({rank["node"] for rank in status["ranks"]}) == 2

    wait(is_spread, READY_SECONDS, lambda: json.dumps(service.engine_status()["ranks"], indent=1))
    return service.engine_status()


def _load_seconds(service: Service) -> float:
    """Seconds from the start of a rank's pod to the rank's readiness, by the engine's startup phases."""
    phases = ("import", "load", "rendezvous", "warm_up")
    startup = service.engine_status()["startup"]
    return float(sum(phase["seconds"] for phase in startup if phase["name"] in phases))


def _is_node_ready(kubectl: Kubectl, name: str) -> bool:
    return is_ready(kubectl.json("get", "node", name))


def _pods_on(service: Service, node: str) -> list[str]:
    pods = (*service.pods("head"), *service.pods("worker"))
    return [pod["metadata"]["name"] for pod in pods if pod["spec"].get("nodeName") == node]
