"""The local cluster: it starts completely, pods work in it as in any cluster, and its removal leaves nothing behind.

These tests create and remove a second cluster beside the cluster of the other tests. Clusters of kind are not tested.
The processes of clusters and runs are the subject of test_processes.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.components.node import cgroup_hierarchies
from local_kubernetes.images.base import base_image
from local_kubernetes.images.graft import grafted_layers
from local_kubernetes.images.store import LABEL, Store
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import NODE_NAMES, REPOSITORY, Place
from local_kubernetes.machine.processes import Processes
from local_kubernetes.machine.shell import ClusterError, run, wait_until

INDEX = 1
PLACE = Place.of(INDEX)

needs_local = pytest.mark.skipif(
    bool(os.environ.get("E2E_KUBECONFIG")) or os.environ.get("E2E_CLUSTER", "local") != "local",
    reason="the environment chooses another kind of cluster",
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="nodes need root")


@pytest.fixture
def removed() -> Iterator[None]:
    """Removes the second cluster before and after the test."""
    LocalCluster(PLACE).down()
    yield
    LocalCluster(PLACE).down()


@pytest.fixture(scope="module")
def second() -> Iterator[LocalCluster]:
    cluster = LocalCluster(PLACE)
    cluster.up("full")
    cluster.load_image(base_image())
    yield cluster
    cluster.down()


def pod(name: str, node: str, *command: str) -> dict[str, object]:
    container = {"name": "main", "image": base_image(), "command": list(command)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0},
    }


def started() -> dict[str, int]:
    """Name -> id of the processes that the tool has started, without their short-lived children."""
    records = (PLACE.state / "processes").glob("*.json")
    return {each.stem: json.loads(each.read_text())["pid"] for each in records}


def remains() -> list[str]:
    """Everything on this machine that belongs to the second cluster, in words."""
    found = [f"process {pid}" for pid in Processes(PLACE.state).alive()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(PLACE.state) in line]
    found += [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(PLACE.bridge)]
    cgroups = [PLACE.node(name).cgroup for name in NODE_NAMES]
    found += [str(one / name) for one in cgroup_hierarchies() for name in cgroups if (one / name).exists()]
    found += [line for line in run("ip", "route", "show").splitlines() if f"10.{220 + INDEX}." in line]
    return found + ([str(PLACE.state)] if PLACE.state.exists() else [])


def machine() -> tuple[str, ...]:
    """State of the machine that a cluster must not change: named network namespaces, packet rules, forwarding."""
    rules = "\n".join(line for line in run("iptables-save").splitlines() if line.startswith("-"))
    return run("ip", "netns", "list"), rules, Path("/proc/sys/net/ipv4/ip_forward").read_text()


@needs_local
@needs_root
def test_second_up_changes_nothing(second: LocalCluster) -> None:
    before = started()
    second.up("full")
    assert started() == before
    assert set(before.values()) <= set(Processes(PLACE.state).alive())
    nodes = Kubectl(second.kubeconfig).json("get", "nodes")["items"]
    assert sorted(node["metadata"]["name"] for node in nodes) == ["node-a", "node-b"]


@needs_local
@needs_root
def test_up_mends_what_died(second: LocalCluster) -> None:
    Processes(PLACE.state).stop("kube-scheduler")
    Processes(PLACE.state).stop("node-b.kubelet")
    second.up("full")
    assert Processes(PLACE.state).is_alive("kube-scheduler")
    assert Processes(PLACE.state).is_alive("node-b.kubelet")


@needs_local
@needs_root
def test_pods_talk_across_nodes_and_the_api_reaches_into_them(second: LocalCluster) -> None:
    kubectl = Kubectl(second.kubeconfig)
    server = "import http.server as h; print('listening', flush=True); h.test(h.SimpleHTTPRequestHandler, port=8080)"
    kubectl.apply(
        pod("server", "node-a", "python3", "-c", server),
        pod("near", "node-a", "sleep", "infinity"),
        pod("far", "node-b", "sleep", "infinity"),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server", "namespace": "default"},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    kubectl("wait", "pod", "--all", "--for=condition=Ready", "--timeout=180s", timeout_s=200)
    wait_until("the first log line", lambda: "listening" in kubectl("logs", "server"), 60)
    # The time limit is two seconds, because a connection that begins while a node changes its rules for the Service
    # hangs.
    request = "import urllib.request as r; assert r.urlopen('http://{host}/', timeout=2).status == 200"
    code = request.format(host="server.default.svc.cluster.local")
    # kube-proxy updates its rules shortly after the pod is ready. The server as a client is a special case: the request
    # to the Service returns to the pod that sent it.
    for client in ("far", "near", "server"):
        command = ("exec", client, "--", "python3", "-c", code)
        wait_until(f"an answer to {client}", lambda command=command: kubectl.succeeds(*command), 120)  # type: ignore[misc]
    code = request.format(host=f"{kubectl.json('get', 'pod', 'server')['status']['podIP']}:8080")
    wait_until("an answer", lambda: kubectl.succeeds("exec", "far", "--", "python3", "-c", code), 120)
    # Processes of this machine reach pods, too.
    run(sys.executable, "-c", code.replace("timeout=2", "timeout=60"))


@needs_local
@needs_root
def test_a_stopped_node_is_lost_and_comes_back(second: LocalCluster) -> None:
    kubectl = Kubectl(second.kubeconfig)
    second.stop_node("node-b")
    kubectl("wait", "node/node-b", "--for=condition=Ready=Unknown", "--timeout=180s", timeout_s=200)
    second.start_node("node-b")
    kubectl("wait", "node/node-b", "--for=condition=Ready", "--timeout=180s", timeout_s=200)
    with pytest.raises(ClusterError, match="there is no node 'node-c'; there are: node-a, node-b"):
        second.stop_node("node-c")


@needs_local
@needs_root
def test_a_loaded_image_is_read_in_place(second: LocalCluster) -> None:
    name = base_image()
    layers = {layer.id for layer in Store.of_buildah().layers(name)}
    second.load_image(name)
    for node in NODE_NAMES:
        assert layers <= grafted_layers(PLACE.node(node).folder / "containerd")


@needs_local
@needs_root
def test_an_image_that_was_replaced_is_let_go(second: LocalCluster, tmp_path: Path) -> None:
    name = "rayloom.dev/test:changing"
    layers = []
    try:
        for content in ("one", "two"):
            (tmp_path / "file").write_text(content)
            container = run("buildah", "from", "scratch").strip()
            run("buildah", "copy", "-q", container, tmp_path / "file", "/file")
            run("buildah", "config", "--label", f"{LABEL}=test", container)
            run("buildah", "commit", "-q", "--rm", container, name)
            second.load_image(name)
            layers.append(Store.of_buildah().layers(name)[0].id)
        for node in NODE_NAMES:
            grafted = grafted_layers(PLACE.node(node).folder / "containerd")
            assert layers[1] in grafted
            assert layers[0] not in grafted
    finally:
        run("buildah", "rmi", name)


@needs_local
@needs_root
def test_down_leaves_nothing(second: LocalCluster) -> None:
    kubectl = Kubectl(second.kubeconfig)
    kubectl.apply(*(pod(f"on-{node}", node, "sleep", "infinity") for node in NODE_NAMES))
    kubectl("wait", "pod", "on-node-a", "on-node-b", "--for=condition=Ready", "--timeout=180s", timeout_s=200)
    assert remains() != []
    second.down()
    assert remains() == []


@needs_local
@needs_root
def test_a_killed_up_leaves_nothing_after_down(removed: None) -> None:
    before = machine()
    killed_when_there_is("node-b.containerd")
    assert remains() != []
    LocalCluster(PLACE).down()
    assert remains() == []
    assert machine() == before


@needs_local
@needs_root
def test_up_after_a_killed_up_starts_afresh(removed: None) -> None:
    killed_when_there_is("etcd")
    before = set(Processes(PLACE.state).alive())
    cluster = LocalCluster(PLACE)
    cluster.up("full")
    assert before and before.isdisjoint(Processes(PLACE.state).alive())
    assert len(Kubectl(cluster.kubeconfig).json("get", "nodes")["items"]) == 2


@needs_local
def test_without_nodes_there_is_an_api_with_rayclusters(removed: None) -> None:
    cluster = LocalCluster(PLACE)
    cluster.up("api")
    kubectl = Kubectl(cluster.kubeconfig)
    assert kubectl.json("get", "nodes")["items"] == []
    assert kubectl.json("get", "rayclusters", "--all-namespaces")["items"] == []
    assert not Path(f"/sys/class/net/{PLACE.bridge}").exists()
    cluster.down()
    assert remains() == []


def killed_when_there_is(process: str) -> None:
    """Starts the second cluster from a separate process, which is killed once `process` runs."""
    command = [sys.executable, "-m", "local_kubernetes", "--index", str(INDEX), "up"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "tools")}
    starter = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def runs() -> bool:
        assert starter.poll() is None, f"up ended with code {starter.returncode} before it started {process}"
        return bool(Processes(PLACE.state).alive(process))

    try:
        # A first line in the log of the process would come too early, because the process gets its mark only later. By
        # this mark the next `up` finds the process.
        wait_until(f"the start of {process}", runs, 300)
    finally:
        starter.kill()
        starter.wait()
