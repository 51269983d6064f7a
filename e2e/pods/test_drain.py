"""Terminating pods: streams finish, ranks run until then, and no pod waits longer than needed.

All tests share one service, and the last test deletes it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import STRIKE_AT, StreamTokens, problem_of, undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, ROOT, Service, is_ready, manifest, wait
from disruptions.faults import signal_process
from disruptions.running_load import running_load
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError

pytestmark = pytest.mark.slow

NUM_STREAMS = 4
# Tokens of an answer. The request that causes the fault takes a second, and must be over in the answer's first half.
NUM_TOKENS = 96
LATE_TOKENS = 2
# A terminating pod accepts requests for two more seconds. Later requests must reach the other engine.
_UNROUTED_SECONDS = 3.0
# The grace period of pods, with `drainSeconds` of 90. A pod without running streams ends long before.
_GRACE_SECONDS = 105.0


@pytest.fixture(scope="module")
def replicas(operator: Kubectl) -> Iterator[tuple[Service, StreamTokens]]:
    with new_namespace(operator, "drain") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2-two-replicas")
        # Long enough for a busy machine: these tests check how streams end, not their speed.
        operator.apply(manifest(ROOT / "examples" / "smollm2-two-replicas.yaml", namespace, drainSeconds=90))
        _wait_for_both(service)
        yield service, undisturbed(service, NUM_TOKENS)


def _wait_for_both(service: Service) -> None:
    def is_so() -> bool:
        # A recreated pod starts more slowly than the operator polls. So when all pods are ready again, the `ready` of
        # the status was written after the loss.
        pods = [*service.pods("head"), *service.pods("worker")]
        return len(pods) == 4 and all(map(is_ready, pods)) and service.get().get("status", {}).get("ready") == "2/2"

    wait(is_so, READY_SECONDS, service.story)


def _streams_during(service: Service, strike: Callable[[], object], **settings: Any) -> list[dict[str, Any]]:
    """Records of streams that ran when `strike` was called, and of later requests.

    `strike` is called when each stream has at least 16 and at most half of its tokens.
    """
    urls = [service.url] * NUM_STREAMS
    sizes = {"num_tokens": NUM_TOKENS, "late_tokens": LATE_TOKENS}
    with running_load(service, urls=urls, strike_at=STRIKE_AT, **sizes, **settings) as running:
        strike()
        running.start_arrivals()
        running.wait_for_streams()
    records = running.records
    assert len(records["had"]) == NUM_STREAMS and max(records["had"]) <= NUM_TOKENS // 2, f"too late: {records['had']}"
    streams: list[dict[str, Any]] = records["streams"]
    return streams


def _failures(streams: list[dict[str, Any]], expected: StreamTokens) -> list[str]:
    return [problem for each in streams if (problem := problem_of(each, expected))]


def _names(service: Service) -> set[str]:
    return {pod["metadata"]["name"] for kind in ("head", "worker") for pod in service.pods(kind)}


def _workers(service: Service) -> set[str]:
    return {pod["metadata"]["name"] for pod in service.pods("worker")}


def _seconds_to_delete(service: Service, pod: str) -> float:
    began = time.monotonic()
    service.kubectl("delete", "pod", pod, "--namespace", service.namespace, "--timeout=120s", timeout_s=130)
    return time.monotonic() - began


@contextlib.contextmanager
def _dead_control_store(service: Service, cluster: str) -> Iterator[None]:
    """Kills Ray's control store, and pauses the command that would restart the store.

    The pause lasts until the block ends. A worker pod that starts in this time waits for its head.
    """
    heads = [pod["metadata"] for pod in service.pods("head")]
    head = next(meta["name"] for meta in heads if meta["labels"]["ray.io/cluster"] == cluster)
    container = (service.kubectl, service.namespace, head, "ray-head")
    signal_process(*container, "ray start --[h]ead", "STOP")
    try:
        signal_process(*container, "gcs/gcs[_]server", "KILL")
        yield
    finally:
        signal_process(*container, "ray start --[h]ead", "CONT")


def test_no_pod_is_evicted_while_no_node_is_being_emptied(replicas: tuple[Service, StreamTokens]) -> None:
    service, _ = replicas
    for kind in ("head", "worker"):
        name = service.pods(kind)[0]["metadata"]["name"]
        path = f"/api/v1/namespaces/{service.namespace}/pods/{name}/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        with pytest.raises(ClusterError, match="disruption budget"):
            service.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction).encode())


def test_an_engine_whose_head_pod_is_deleted_finishes_its_streams_and_no_request_is_refused(
    replicas: tuple[Service, StreamTokens], capsys: pytest.CaptureFixture[str]
) -> None:
    service, expected = replicas
    name = service.pods("head")[0]["metadata"]["name"]
    struck_at = 0.0

    def delete() -> None:
        nonlocal struck_at
        service.delete_pod(name)
        struck_at = time.time()

    streams = _streams_during(service, delete, late_every_s=0.4, late_for_s=_UNROUTED_SECONDS + 2.0)
    assert _failures(streams, expected) == []
    later = [each for each in streams if each["began"] > struck_at + _UNROUTED_SECONDS]
    assert len(later) >= NUM_STREAMS, "requests kept coming after the pod had left its Service"
    with capsys.disabled():
        print(
            f"\n  a head pod was deleted: 0 of {len(streams)} requests failed, {len(later)} of them came after it left"
        )


def test_a_pod_with_ranks_that_goes_alone_goes_in_seconds(
    replicas: tuple[Service, StreamTokens], capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = replicas
    _wait_for_both(service)
    seconds = _seconds_to_delete(service, min(_workers(service)))
    assert seconds < _GRACE_SECONDS / 2, (
        "it waits six seconds for a drain that does not come, and not for its grace of 105"
    )
    with capsys.disabled():
        print(f"\n  a worker pod was deleted alone: gone after {seconds:.1f} s")


def test_a_pod_that_waits_for_the_head_goes_in_seconds(
    replicas: tuple[Service, StreamTokens], capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = replicas
    _wait_for_both(service)
    before = _workers(service)
    worker = min(service.pods("worker"), key=lambda pod: pod["metadata"]["name"])
    waiting: list[str] = []

    def waits() -> bool:
        for pod in service.pods("worker"):
            states = [each["state"] for each in pod["status"].get("initContainerStatuses", ())]
            if pod["metadata"]["name"] not in before and any("running" in state for state in states):
                waiting.append(pod["metadata"]["name"])
        return bool(waiting)

    with _dead_control_store(service, worker["metadata"]["labels"]["ray.io/cluster"]):
        service.delete_pod(worker["metadata"]["name"])
        wait(waits, READY_SECONDS, lambda: f"none of {_names(service)} waits for its head")
        seconds = _seconds_to_delete(service, waiting[0])
    assert seconds < _GRACE_SECONDS / 2, (
        "there are no ranks in it yet, and it does not stay for its grace of 105 seconds"
    )
    with capsys.disabled():
        print(f"\n  a worker pod that waited for its head was deleted: gone after {seconds:.1f} s")


def test_a_service_that_is_deleted_finishes_its_streams(
    replicas: tuple[Service, StreamTokens], capsys: pytest.CaptureFixture[str]
) -> None:
    service, expected = replicas
    _wait_for_both(service)

    def delete() -> None:
        service.kubectl("delete", "llm", service.name, "--namespace", service.namespace, "--wait=false")

    streams = _streams_during(service, delete, late_every_s=0)
    assert _failures(streams, expected) == []
    ended_at = max(each["ended"] for each in streams)
    wait(lambda: not _names(service), _GRACE_SECONDS / 2, lambda: f"still there: {_names(service)}")
    with capsys.disabled():
        print(f"\n  the service was deleted: its last pod was gone {time.time() - ended_at:.1f} s after its last token")
