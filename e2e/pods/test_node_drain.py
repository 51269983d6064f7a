"""`kubectl drain` of a node with an engine replica, under steady streams: another replica serves first.

kubectl refuses to drain a node with a pod that has no controller, such as a test's client. So the test has a file of
its own, and no other test's client is on the node.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, Service, wait
from disruptions.rollout_under_load import (
    DRAIN_SECONDS,
    NUM_TOKENS,
    RolloutRecord,
    expect_unnoticed,
    roll_out,
    rollable,
)
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl

pytestmark = pytest.mark.slow

HOLD_SECONDS = 5
# Longer than the start of one replica and the drain of another together.
_DRAIN_TIMEOUT_S = DRAIN_SECONDS + 150


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_drained_node_costs_nobody_anything(
    operator: Kubectl, cluster: Cluster, show_rollout: Callable[[RolloutRecord], None], replicas: int
) -> None:
    with new_namespace(operator, f"node-drain-{replicas}") as namespace, ThreadPoolExecutor(1) as thread:
        operator.apply(rollable(namespace, HOLD_SECONDS, replicas=replicas))
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        wait(lambda: service.has(replicas), READY_SECONDS, service.story)
        node = service.pods("head")[0]["spec"]["nodeName"]
        (other,) = set(cluster.node_names()) - {node}
        # No controller would recreate the client, so it must be on another node.
        operator("delete", "pod", service.client.name, "--namespace", namespace)
        service.client = Client.start(operator, namespace, "elsewhere", other)
        expected = undisturbed(service, NUM_TOKENS)
        command = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={_DRAIN_TIMEOUT_S}s")
        drains: list[Future[str]] = []

        def drain() -> None:
            drains.append(thread.submit(operator, *command, timeout_s=_DRAIN_TIMEOUT_S + 30))

        def is_over() -> bool:
            (drained,) = drains
            if not drained.done():
                return False
            assert drained.exception() is None, drained.exception()
            return service.has(replicas)

        try:
            seen = roll_out(
                service,
                expected,
                f"a node is drained, {replicas} {'engines' if replicas > 1 else 'engine'}",
                drain,
                is_over=is_over,
                seconds=_DRAIN_TIMEOUT_S + 60.0,
            )
            expect_unnoticed(seen, show_rollout)
            assert seen.timeline.most_clusters == replicas + 1, "another engine comes first"
            assert not [pod for kind in ("head", "worker") for pod in service.pods(kind) if _node(pod) == node]
        finally:
            operator("uncordon", node)


def _node(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName"))
