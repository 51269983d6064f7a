"""Processes of local clusters and of runs: how they are started, recognised and ended. These tests start no cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.components.node import delegate_controllers
from local_kubernetes.machine.files import locked
from local_kubernetes.machine.place import REPOSITORY, Place
from local_kubernetes.machine.processes import Processes
from local_kubernetes.machine.runs import end_runs, refuse_beside_another
from local_kubernetes.machine.shell import ClusterError, CommandTimeout, run, run_shown, wait_until
from rt_ports import free_port

PLACE = Place.of(1)
# Environment variable that marks the processes of a run in these tests. Other tests use the machine's cluster at the
# same time, so the usual variable must not be used here.
MARK = "RAYLOOM_RUN_OF_A_TEST"


def test_only_the_very_process_that_was_started_is_taken_for_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.ensure("sleeper", "sleep", "1000")
    try:
        assert processes.is_alive("sleeper")
        # A record with the same id and another start time means that the process has ended and another process has its
        # id.
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
    # The kernel frees a process's memory before its ports. Freeing 4 GB of an API server takes 0.3 s.
    program = """
import socket, sys
memory = bytearray(1 << 30)
memory[::4096] = b"x" * len(memory[::4096])
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
listening.accept()
"""
    port = free_port()  # a port that no connection of another process uses
    monkeypatch.setattr("local_kubernetes.machine.shell._PAUSE_S", 0.001)
    processes = Processes(tmp_path)
    log = processes.log("server")
    try:
        processes.ensure("server", sys.executable, "-c", program, port)
        wait_until("its port", lambda: log.read_text() == "listening\n", 60)
        processes.stop("server")
        socket.create_server(("127.0.0.1", port)).close()
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
    # Like the steps of an image's build, the child has no mark.
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
    """The command line of a process; empty for an ended process or a zombie."""
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
