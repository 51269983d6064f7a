"""Tests on a real API server, with real controllers, scheduler and KubeRay, and operators as real processes.

    world        see standins/world.py; one for the session
    namespace    the name of a new namespace, removed after the test
    operator     an operator runs; the same one for all tests that ask for nothing else

Nodes and engines are played (standins/): what only they can show is tested in real pods by `make e2e`.
E2E_INDEX=6 takes another local cluster than the usual one, so that this can run beside a cluster with nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.namespaces import llm_service, new_namespace
from api.place import PLACE, WORKER
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.chart import install_chart
from operator_processes.process import OperatorProcess
from real_api_server.world import World
from simulated_nodes.kubelets import NODES

_LEFT = "rayloom.dev/e2e=true"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    cluster = LocalCluster(PLACE)
    cluster.up("api")
    kubectl = Kubectl(cluster.kubeconfig)
    others = {each["metadata"]["name"] for each in kubectl.json("get", "nodes")["items"]} - set(NODES)
    assert not others, f"these tests play the nodes, and this cluster has its own ({others}): make cluster-down"
    install_chart(cluster.kubeconfig)
    found = World(cluster.kubeconfig, tmp_path_factory.mktemp("operators"))
    # What a run that was killed left; its pods end only now that their nodes are back.
    kubectl("delete", "namespace", "--selector", _LEFT, "--timeout=60s", timeout_s=70)
    yield found
    kubectl("delete", "namespace", "--selector", _LEFT, "--wait=false")
    found.close()
    if WORKER:  # whatever runs next wants the memory and the cores, and knows of the usual cluster alone
        cluster.down()


@pytest.fixture(scope="session")
def kubectl(world: World) -> Kubectl:
    return Kubectl(world.kubeconfig)


@pytest.fixture
def namespace(world: World, request: pytest.FixtureRequest) -> Iterator[str]:
    name = new_namespace(world, request.node.name)
    yield name
    world.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def operator(world: World) -> OperatorProcess:
    return world.operator()


@pytest.fixture
def manifest(namespace: str) -> Callable[..., dict[str, Any]]:
    """manifest("chat", replicas=2) is an LLMService in the test's namespace."""

    def make(name: str = "chat", **spec: Any) -> dict[str, Any]:
        return llm_service(namespace, name, **spec)

    return make
