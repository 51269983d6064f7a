"""The local cluster: it starts completely, pods work in it as in any cluster, and its removal leaves nothing.

These tests create and remove a second cluster beside the one of the other tests. Clusters of kind are not tested.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.components.node import cgroup_hierarchies, delegate_controllers
from local_kubernetes.images.base import base_image
from local_kubernetes.images.graft import grafted_layers
from local_kubernetes.images.store import LABEL, Store
from local_kubernetes.machine.files import locked
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.place import NODE_NAMES, REPOSITORY, Place
from local_kubernetes.machine.processes import Processes
from local_kubernetes.machine.runs import end_runs, refuse_beside_another
from local_kubernetes.machine.shell import ClusterError, CommandTimeout, run, run_shown, wait_until

INDEX = 1
PLACE = Place.of(INDEX)
# Environment variable that marks the processes of a run in these tests. It is not the usual one, because other tests
# use the machine's cluster at the same time.
MARK = "RAYLOOM_RUN_OF_A_TEST"

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
    before = Processes(PLACE.state).alive()
    second.up("full")
    assert set(before) <= set(Processes(PLACE.state).alive())
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
    wait_until("the default account", lambda: kubectl.succeeds("get", "serviceaccount", "default"), 60)
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
    kubectl("wait", "pod", "--all", "--for=condition=Ready", "--timeout=60s", timeout_s=70)
    wait_until("the first log line", lambda: "listening" in kubectl("logs", "server"), 60)
    request = "import urllib.request as r; print(r.urlopen('http://{host}/', timeout=2).status)"
    code = request.format(host="server.default.svc.cluster.local")
    # kube-proxy's rules follow the pod's readiness a moment later. The server as a client is a special case: its
    # request to the Service returns to its own pod.
    for client in ("far", "near", "server"):
        command = ("exec", client, "--", "python3", "-c", code)
        wait_until(f"an answer to {client}", lambda command=command: kubectl.succeeds(*command), 60)  # type: ignore[misc]
        assert kubectl(*command).strip() == "200"
    address = kubectl.json("get", "pod", "server")["status"]["podIP"]
    assert kubectl("exec", "far", "--", "python3", "-c", request.format(host=f"{address}:8080")).strip() == "200"
    # This machine reaches pods as well.
    assert run(sys.executable, "-c", request.format(host=f"{address}:8080")).strip() == "200"


@needs_local
@needs_root
def test_a_stopped_node_is_lost_and_comes_back(second: LocalCluster) -> None:
    kubectl = Kubectl(second.kubeconfig)
    second.stop_node("node-b")
    kubectl("wait", "node/node-b", "--for=condition=Ready=Unknown", "--timeout=60s", timeout_s=70)
    second.start_node("node-b")
    kubectl("wait", "node/node-b", "--for=condition=Ready", "--timeout=60s", timeout_s=70)
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
    kubectl("wait", "pod", "on-node-a", "on-node-b", "--for=condition=Ready", "--timeout=60s", timeout_s=70)
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
    assert before.isdisjoint(Processes(PLACE.state).alive())
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


def test_only_the_very_process_that_was_started_is_taken_for_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.ensure("sleeper", "sleep", "1000")
    try:
        assert processes.is_alive("sleeper")
        # A record with the same id and another start time: its process ended and another one got its id.
        record = tmp_path / "processes" / "sleeper.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"started": "1"}))
        assert not processes.is_alive("sleeper")
    finally:
        processes.stop_all()
    assert processes.alive() == ()


def test_a_process_carries_its_mark_as_soon_as_it_was_started(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        for number in range(200):
            pid = processes.ensure(f"sleeper{number}", "sleep", "1000")
            assert pid in processes.alive()
    finally:
        processes.stop_all()


def test_a_process_that_was_stopped_has_given_its_port_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel frees memory before ports: this takes 0.3 s for an API server of 4 GB.
    program = """
import socket
memory = bytearray(1 << 30)
memory[::4096] = b"x" * len(memory[::4096])
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
listening.accept()
"""
    monkeypatch.setattr("local_kubernetes.machine.shell._PAUSE_S", 0.001)
    processes = Processes(tmp_path)
    log = processes.log("server")
    try:
        processes.ensure("server", sys.executable, "-c", program)
        wait_until("its port", lambda: log.read_text().endswith("\n"), 60)
        processes.stop("server")
        socket.create_server(("127.0.0.1", int(log.read_text()))).close()
    finally:
        processes.stop_all()


def test_a_cluster_of_the_same_addresses_in_another_folder_is_refused(tmp_path: Path) -> None:
    twin = tmp_path / "rayloom" / "e2e" / PLACE.state.name
    others = Processes(twin)
    others.ensure("etcd", "sleep", "1000")
    try:
        with pytest.raises(ClusterError, match=f"runs in {twin}. End it: XDG_STATE_HOME={tmp_path} make cluster-down"):
            LocalCluster(PLACE).up("api")
    finally:
        others.stop_all()


def test_a_process_takes_its_children_along_and_no_stranger(tmp_path: Path) -> None:
    ours, others = Processes(tmp_path / "ours"), Processes(tmp_path / "others")
    ours.ensure("parent", "sh", "-c", "sleep 1000 & sleep 1000")
    others.ensure("parent", "sleep", "1000")
    try:
        wait_until("the child", lambda: len(ours.alive()) >= 3, 60)
        ours.stop_all()
        assert ours.alive() == ()
        assert len(others.alive()) == 1
    finally:
        ours.stop_all()
        others.stop_all()


def test_a_process_whose_config_changed_is_started_again(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        first = processes.ensure("sleeper", "sleep", "1000", config="one")
        assert processes.ensure("sleeper", "sleep", "1000", config="one") == first
        assert processes.ensure("sleeper", "sleep", "1000", config="two") != first
    finally:
        processes.stop_all()


def test_a_process_that_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    try:
        processes.ensure("sleeper", "sleep", "1000")
        processes.ensure("failing", "sh", "-c", "echo no room left; exit 1")
        wait_until("its end", lambda: not processes.is_alive("failing"), 60)
        with pytest.raises(ClusterError, match=r"have ended: failing\n(.*)failing.log, its end:\n  no room left"):
            processes.expect_all_alive()
        processes.ensure("failing", "sleep", "1000")
        processes.expect_all_alive()
    finally:
        processes.stop_all()


def test_a_lock_that_is_held_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, "it", 1):
        message = rf"waited 0 s for the lock of it, held by another process: process {os.getpid()} of {REPOSITORY}$"
        with pytest.raises(ClusterError, match=message), locked(path, "it", 0.2):
            pass
    with locked(path, "it", 0.2):
        pass


def test_a_command_that_takes_too_long_is_ended() -> None:
    for command in (run, run_shown):
        with pytest.raises(CommandTimeout, match="sleep 1000 did not end within 0 s"):
            command("sleep", "1000", timeout_s=0.2)


def test_what_a_killed_run_left_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_kubernetes.machine.runs.REPOSITORY", tmp_path)
    monkeypatch.setattr("local_kubernetes.machine.runs._RUN", MARK)
    # The child has no mark, like the steps of an image's build.
    script = "env --ignore-environment sleep 1001 & exec sleep 1002"
    left = subprocess.Popen(["sh", "-c", script], env=os.environ | {MARK: str(tmp_path)})
    try:
        children = Path(f"/proc/{left.pid}/task/{left.pid}/children")
        wait_until("the child", lambda: bool(children.read_text()), 60)
        child = Path("/proc", children.read_text().strip())
        wait_until("the child to forget", lambda: MARK.encode() not in (child / "environ").read_bytes(), 60)
        end_runs()
        assert left.wait(60) == -signal.SIGKILL
        wait_until("the child's end", lambda: not command_line(child), 60)
    finally:
        left.kill()


def test_beside_a_run_of_another_checkout_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("local_kubernetes.machine.runs._RUN", MARK)
    other = subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: str(tmp_path)})
    try:
        message = rf"{tmp_path} has a run on this machine's test cluster \(process {other.pid}\)"
        for command in (refuse_beside_another, LocalCluster(PLACE).down):
            with pytest.raises(ClusterError, match=message):
                command()
    finally:
        other.kill()
        other.wait()
    refuse_beside_another()


def test_a_group_of_the_second_version_hands_its_controllers_down(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids rdma\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    delegate_controllers(tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory +pids"


def command_line(process: Path) -> bytes:
    """The file of an ended process or a zombie is missing or empty."""
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def killed_when_there_is(process: str) -> None:
    """Starts the second cluster from a separate process, which is killed once `process` has been started."""
    command = [sys.executable, "-m", "local_kubernetes", "--index", str(INDEX), "up"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "tools")}
    starter = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    log = Processes(PLACE.state).log(process)
    while not log.exists():
        assert starter.poll() is None, f"up ended with code {starter.returncode} before it started {process}"
        assert time.monotonic() < deadline, f"up did not start {process} in 120 s"
    starter.send_signal(signal.SIGKILL)
    starter.wait()
