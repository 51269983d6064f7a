"""A fault under running streams causes only a pause. The tests cause one fault after the other in one service.

Each test prints a timeline. Lost nodes are in test_node_loss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import StreamTokens, undisturbed
from clients.namespaces import new_namespace
from clients.service import OPERATOR_NAMESPACE, Service, is_ready
from disruptions.fault_under_load import FaultRecord
from disruptions.faults import signal_process, signal_rank
from disruptions.scene import Scene, breakable
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl


@pytest.fixture(scope="module")
def pipeline(operator: Kubectl) -> Iterator[tuple[Service, StreamTokens]]:
    with new_namespace(operator, "faults") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2-pp2")
        operator.apply(breakable(namespace))
        service.wait_available()
        yield service, undisturbed(service)


@pytest.fixture
def scene(pipeline: tuple[Service, StreamTokens], show: Callable[[str, FaultRecord], None]) -> Scene:
    return Scene(*pipeline, show)


def _pids(status: dict[str, Any]) -> dict[int, tuple[str, int]]:
    return {rank["rank"]: (rank["host"], rank["pid"]) for rank in status["ranks"]}


def test_a_deleted_worker_pod_costs_a_pause(scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()
    victim = before["ranks"][1]["host"]
    scene.break_it(
        "a worker pod is deleted",
        lambda: service.delete_pod(victim),
        is_over=scene.is_serving_after(before["epoch"]),
    )
    after = service.engine_status()
    assert after["ranks"][1]["host"] != victim
    assert _pids(after)[0] == _pids(before)[0], "the other rank lives on"


def test_a_killed_rank_costs_a_pause(scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()
    scene.break_it(
        "a rank is killed",
        lambda: signal_rank(service.kubectl, service.namespace, before["ranks"][1], "KILL"),
        is_over=scene.is_serving_after(before["epoch"]),
    )
    after = service.engine_status()
    assert after["recoveries"][-1]["process"] == "rank 1"
    assert _pids(after)[0] == _pids(before)[0], "the other rank lives on"
    assert after["ranks"][1]["host"] == before["ranks"][1]["host"], "no pod was made anew for it"


def test_a_stopped_rank_is_named_in_the_status_and_replaced(scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()
    seen = scene.break_it(
        "a rank is stopped",
        lambda: signal_rank(service.kubectl, service.namespace, before["ranks"][0], "STOP"),
        is_over=scene.is_serving_after(before["epoch"]),
    )
    named_s = seen.timeline.said("Available", "False", "rank 0")
    assert named_s is not None and named_s < seen.tokens_s, "it is named before it is replaced"
    assert service.engine_status()["recoveries"][-1]["process"] == "rank 0"


def test_a_killed_core_costs_a_pause(scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()
    head = service.pods("head")[0]["metadata"]["name"]
    scene.break_it(
        "the core is killed",
        lambda: signal_process(
            service.kubectl, service.namespace, head, "engine", "rayloom_engine[.]core_server[.]process"
        ),
        is_over=scene.is_serving_after(before["epoch"]),
    )
    assert _pids(service.engine_status()) == _pids(before), "the ranks live on"


def test_a_restarted_operator_is_not_noticed(scene: Scene) -> None:
    service = scene.service
    pods = ("get", "pods", "--namespace", OPERATOR_NAMESPACE)
    old = {pod["metadata"]["uid"] for pod in service.kubectl.json(*pods)["items"]}
    delete = ("delete", "pods", "--all", "--namespace", OPERATOR_NAMESPACE, "--wait=false")

    def is_back() -> bool:
        found = [pod for pod in service.kubectl.json(*pods)["items"] if pod["metadata"]["uid"] not in old]
        return any(is_ready(pod) for pod in found)

    before = service.engine_status()["epoch"]
    seen = scene.break_it("the operator is restarted", lambda: service.kubectl(*delete), is_over=is_back)
    assert seen.available_s is None and service.engine_status()["epoch"] == before


def test_a_restarted_kuberay_is_not_noticed(cluster: Cluster, scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()["epoch"]
    seen = scene.break_it(
        "KubeRay is restarted",
        lambda: cluster.stop_kuberay(),
        mend=lambda _: cluster.up("full"),
        is_over=lambda: True,
    )
    assert seen.available_s is None and service.engine_status()["epoch"] == before


def test_a_killed_control_store_of_ray_costs_a_pause(scene: Scene) -> None:
    service = scene.service
    before = service.engine_status()
    head = service.pods("head")[0]["metadata"]
    scene.break_it(
        "Ray's gcs_server is killed",
        lambda: signal_process(service.kubectl, service.namespace, head["name"], "ray-head", "gcs/gcs[_]server"),
        is_over=scene.is_serving_after(before["epoch"]),
    )
    assert service.pods("head")[0]["metadata"]["uid"] == head["uid"]
