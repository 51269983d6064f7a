"""Fixtures of tests on a real API server, with real controllers, scheduler and KubeRay, and operators as processes.

world        a World (tests/support/real_api_server/world.py), one for the session
namespace    the name of a new namespace, whose services are deleted after the test
operator     a running operator with the default flags, which tests share
manifest     a function that returns the manifest of an LLMService in `namespace`

Nodes and engines are simulated (tests/support/simulated_nodes/). `make e2e` tests with real nodes and engines.
E2E_INDEX=6 chooses another local cluster, so that these tests can run beside a cluster with nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.namespaces import delete_services, llm_service, new_namespace
from api.place import PLACE, WORKER
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.kubectl import Kubectl
from operator_processes.chart import install_chart
from operator_processes.process import OperatorProcess
from real_api_server.world import World
from simulated_nodes.nodes import NODES

# Percentage by which the heap of a Go program grows between two garbage collections. With 400 instead of the default of
# 100, the API server needs a sixth less CPU time, and up to 1.4 GiB of memory.
_HEAP_GROWTH = "400"
_LEFT = "rayloom.dev/e2e=true"
# Folders of the slowest test files, the slowest folder first.
_LONG = ("api/rollouts/", "api/scaling/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the slowest test files first, so that all processes of a run end at about the same time."""
    items.sort(key=lambda item: next((place for place, part in enumerate(_LONG) if part in item.nodeid), len(_LONG)))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    os.environ.setdefault("GOGC", _HEAP_GROWTH)
    cluster = LocalCluster(PLACE)
    cluster.up("api")
    kubectl = Kubectl(cluster.kubeconfig)
    others = {each["metadata"]["name"] for each in kubectl.json("get", "nodes")["items"]} - set(NODES)
    assert not others, f"these tests simulate the nodes, and this cluster has others ({others}): make cluster-down"
    install_chart(cluster.kubeconfig)
    found = World(cluster.kubeconfig, tmp_path_factory.mktemp("operators"))
    # A killed run may have left namespaces. The pods in them can end now, because World has started their simulated
    # kubelets.
    kubectl("delete", "namespace", "--selector", _LEFT, "--timeout=180s", timeout_s=190)
    yield found
    # Clusters other than 0 are removed: later tests need their memory and cores, and reuse only cluster 0. CI removes
    # cluster 0 as well, because its next tests need a cluster with nodes.
    is_removed = bool(WORKER or os.environ.get("CI"))
    if not is_removed:
        kubectl("delete", "namespace", "--selector", _LEFT, "--wait=false")
    found.close()
    if is_removed:
        cluster.down()


@pytest.fixture(scope="session")
def kubectl(world: World) -> Kubectl:
    return Kubectl(world.kubeconfig)


@pytest.fixture
def namespace(world: World, request: pytest.FixtureRequest) -> Iterator[str]:
    name = new_namespace(world, request.node.name)
    yield name
    delete_services(world, name)


@pytest.fixture
def operator(world: World) -> OperatorProcess:
    return world.operator()


@pytest.fixture
def manifest(namespace: str) -> Callable[..., dict[str, Any]]:
    """manifest("chat", replicas=2) returns the manifest of an LLMService in the test's namespace."""

    def make(name: str = "chat", **spec: Any) -> dict[str, Any]:
        return llm_service(namespace, name, **spec)

    return make
