"""Pods that are told to go: streams end in order, ranks stay for them, and nobody waits for nothing.

All of it happens to one service, and the last test takes that away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from service import ROOT, Service, manifest, wait
from streams import STRIKE_AT, Agent

NUM_STREAMS = 4
NUM_TOKENS = 64
LATE_TOKENS = 2


@pytest.fixture(scope="module")
def replicas(operator: Kubectl) -> Iterator[Service]:
    with new_namespace(operator, "drain") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2-two-replicas")
        operator.apply(manifest(ROOT / "examples" / "smollm2-two-replicas.yaml", namespace))
        _wait_for_both(service)
        yield service


def _wait_for_both(service: Service) -> None:
    wait(
        lambda: service.get().get("status", {}).get("ready") == "2/2",
        120.0,
        lambda: json.dumps(service.get().get("status"), indent=1),
    )


def _streams_during(service: Service, strike: Callable[[], object], **settings: Any) -> list[dict[str, Any]]:
    """What became of streams that had begun when `strike` was called, and of requests that came later."""
    urls = [service.url] * NUM_STREAMS
    sizes = {"num_tokens": NUM_TOKENS, "late_tokens": LATE_TOKENS}
    agent = Agent(service, urls=urls, strike_at=STRIKE_AT, **sizes, **settings)
    try:
        agent.hear()  # every stream has tokens
        strike()
        agent.tell("struck")
        assert "ended" in agent.hear()
        agent.tell("stop")
        said = agent.hear()
    finally:
        agent.process.kill()
    assert max(said["had"]) < NUM_TOKENS, "every stream still ran"
    streams: list[dict[str, Any]] = said["streams"]
    return streams


def _failures(streams: list[dict[str, Any]]) -> list[str]:
    wanted = {False: NUM_TOKENS, True: LATE_TOKENS}
    short = [f"{len(each['tokens'])} tokens" for each in streams if len(each["tokens"]) != wanted[each["is_late"]]]
    return [each["failure"] for each in streams if each["failure"]] + short


def _names(service: Service) -> set[str]:
    return {pod["metadata"]["name"] for kind in ("head", "worker") for pod in service.pods(kind)}


def test_an_evicted_engine_finishes_its_streams_and_no_request_is_refused(
    replicas: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    name = replicas.pods("head")[0]["metadata"]["name"]
    path = f"/api/v1/namespaces/{replicas.namespace}/pods/{name}/eviction"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}

    def evict() -> None:
        replicas.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction).encode())

    streams = _streams_during(replicas, evict, late_every_s=0.4)
    assert _failures(streams) == []
    assert len(streams) > 2 * NUM_STREAMS, "requests kept coming"
    with capsys.disabled():
        print(f"\n  a head pod was evicted: 0 of {len(streams)} requests failed")


def test_a_pod_with_ranks_that_goes_alone_goes_in_seconds(
    replicas: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    _wait_for_both(replicas)
    victim = replicas.pods("worker")[0]["metadata"]["name"]
    began = time.monotonic()
    replicas.kubectl("delete", "pod", victim, "--namespace", replicas.namespace, "--timeout=40s")
    seconds = time.monotonic() - began
    assert seconds < 20.0, "it waits six seconds for a drain that does not come, and not for its grace of 45"
    with capsys.disabled():
        print(f"\n  a worker pod was deleted alone: gone after {seconds:.1f} s")


def test_a_service_that_is_deleted_finishes_its_streams(replicas: Service, capsys: pytest.CaptureFixture[str]) -> None:
    _wait_for_both(replicas)

    def delete() -> None:
        replicas.kubectl("delete", "llm", replicas.name, "--namespace", replicas.namespace)

    streams = _streams_during(replicas, delete, late_every_s=0)
    assert _failures(streams) == []
    ended_at = max(each["ended"] for each in streams)
    wait(lambda: not _names(replicas), 20.0, lambda: f"still there: {_names(replicas)}")
    with capsys.disabled():
        print(f"\n  the service was deleted: its last pod was gone {time.time() - ended_at:.1f} s after its last token")
