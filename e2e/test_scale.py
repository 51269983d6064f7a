"""Engines that come and go by hand under steady streams: `kubectl scale`, also to none, and `kubectl drain`.

What a deleted service does to its streams is in test_drain.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from roll import DRAIN_SECONDS, NUM_TOKENS, Roll, failures_of, roll, rollable
from service import Service, wait
from streams import STRIKE_AT, Agent, Said, undisturbed

pytestmark = pytest.mark.slow

HOLD_SECONDS = 5
# Above the time that engines have to drain, and for one to come first.
_DRAIN_TIMEOUT_S = DRAIN_SECONDS + 150


@pytest.fixture(scope="module")
def scaled(operator: Kubectl) -> Iterator[tuple[Service, Said]]:
    with new_namespace(operator, "scale") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, HOLD_SECONDS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def _story(service: Service) -> Callable[[], str]:
    return lambda: json.dumps(service.get().get("status"), indent=1)


def _has(service: Service, number: int) -> Callable[[], bool]:
    """Whether so many engines are there and serve."""

    def is_so() -> bool:
        return service.get()["status"]["ready"] == f"{number}/{number}" and len(service.clusters()) == number

    return is_so


def _expect_nothing(seen: Roll, show: Callable[[Roll], None]) -> None:
    show(seen)
    assert [failure.what for failure in seen.failures] == []
    assert seen.lies == []


def test_a_second_engine_comes_and_goes_and_nobody_notices(
    scaled: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, expected = scaled
    first = service.clusters()
    up = roll(service, expected, "scaled from 1 to 2", lambda: service.scale(2), is_over=_has(service, 2))
    _expect_nothing(up, show_roll)
    (second,) = set(service.clusters()) - set(first)
    down = roll(service, expected, "scaled from 2 to 1", lambda: service.scale(1), is_over=_has(service, 1))
    _expect_nothing(down, show_roll)
    assert up.timeline.most_clusters == down.timeline.most_clusters == 2
    (revision,) = {engine.revision for engine in down.timeline.engines.values()}
    gone = {engine.name for engine in down.timeline.of(revision)} - set(service.clusters())
    assert len(gone) == 1 and gone <= {*first, second}


def test_a_service_of_no_engines_finishes_its_streams_refuses_others_and_comes_back(
    scaled: tuple[Service, Said], capsys: pytest.CaptureFixture[str]
) -> None:
    service, expected = scaled
    wait(_has(service, 1), 60.0, _story(service))
    agent = Agent(service, num_tokens=NUM_TOKENS, strike_at=STRIKE_AT, late_every_s=0)
    try:
        agent.hear()  # every stream has tokens
        service.scale(0)
        agent.tell("struck")
        agent.hear()  # every stream has ended
        agent.tell("stop")
        said = agent.hear()
    finally:
        agent.process.kill()
    assert failures_of(said["streams"], [], expected) == []
    wait(lambda: not service.clusters(), 60.0, _story(service))
    wait(lambda: service.condition("Available")["reason"] == "Suspended", 10.0, _story(service))
    assert service.condition("Available")["status"] == "False"
    status, words = service.chat(max_tokens=1)
    assert status in (0, 503), words
    assert status == 503 or "refused" in words, words
    service.scale(1)
    seconds = service.wait_available()
    assert undisturbed(service, NUM_TOKENS) == expected
    with capsys.disabled():
        print(f"\n  at 0 replicas: {status} {words[:80]}; Available {seconds:.1f} s after `kubectl scale --replicas 1`")


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_drained_node_costs_nobody_anything(
    operator: Kubectl, cluster: Cluster, show_roll: Callable[[Roll], None], replicas: int
) -> None:
    with new_namespace(operator, f"node-drain-{replicas}") as namespace:
        operator.apply(rollable(namespace, HOLD_SECONDS, replicas=replicas))
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        wait(_has(service, replicas), 180.0, _story(service))
        node = service.pods("head")[0]["spec"]["nodeName"]
        (other,) = set(cluster.node_names()) - {node}
        # Nobody would start the client again, so it is not to be on the node.
        operator("delete", "pod", service.client.name, "--namespace", namespace)
        service.client = Client.start(operator, namespace, "elsewhere", other)
        expected = undisturbed(service, NUM_TOKENS)
        options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={_DRAIN_TIMEOUT_S}s")
        started: list[subprocess.Popen[str]] = []

        def is_over() -> bool:
            code = started[0].poll()
            assert code in (None, 0), "kubectl drain has failed"
            return code == 0 and _has(service, replicas)()

        try:
            seen = roll(
                service,
                expected,
                f"a node is drained, {replicas} {'engines' if replicas > 1 else 'engine'}",
                lambda: started.append(operator.start("drain", node, *options)),
                is_over=is_over,
                seconds=_DRAIN_TIMEOUT_S + 60.0,
            )
            _expect_nothing(seen, show_roll)
            assert seen.timeline.most_clusters == replicas + 1, "another engine comes first"
            assert not [pod for kind in ("head", "worker") for pod in service.pods(kind) if _node(pod) == node]
        finally:
            for process in started:
                process.kill()
                process.wait()
            operator("uncordon", node)


def _node(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName"))
