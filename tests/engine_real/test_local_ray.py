"""The Ray that a server starts for itself: no other user of the machine can read its token or reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from rayloom_engine.launcher.local_ray import use_private_ray
from rayloom_engine.supervisor.sockets import make_run_dir
from rt_server import running_server

ARGUMENTS = ("--executor", "ray", "--device", "cpu", "--num-kv-blocks", "64", "--threads", "1")


def listeners(root: psutil.Process) -> dict[str, set[str]]:
    """Process -> the addresses at which it listens, for a process and all of its descendants."""
    found: dict[str, set[str]] = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses = {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
            if addresses:
                found.setdefault(process.name(), set()).update(addresses)
    return found


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()[0].startswith("ray::RankActor")
    return False


def is_named(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == name
    return False


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def test_nobody_else_can_read_its_token_or_reach_it_and_its_rank_has_the_servers_priority(
    three_layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another-cluster's")
    with running_server(tmp_path, "--model", three_layers, *ARGUMENTS) as server:
        found = listeners(psutil.Process(server.process.pid))
        assert {"gcs_server", "raylet"} <= found.keys()
        assert {name for name, addresses in found.items() if not all(map(is_loopback, addresses))} == set()
        assert not (tmp_path / ".ray").exists()

        line = server.children()["local_ray"].cmdline()
        run_dir = Path(line[line.index("--run-dir") + 1])
        assert oct(run_dir.stat().st_mode)[-3:] == "700"
        token = run_dir / "ray_token"
        assert oct(token.stat().st_mode)[-3:] == "600"
        assert len(token.read_text()) == 64
        # Ray makes its session's folders writable for all users, so they are within the run folder.
        assert (run_dir / "ray" / "session_latest" / "sockets" / "raylet").exists()

        processes = psutil.Process(server.process.pid).children(recursive=True)
        (raylet,) = (each for each in processes if is_named(each, "raylet"))
        assert raylet.environ()["RAY_memory_monitor_refresh_ms"] == "0", "a nearly full machine must not cost a rank"
        (rank,) = (each for each in psutil.Process(server.process.pid).children(recursive=True) if is_rank(each))
        assert os.getpriority(os.PRIO_PROCESS, rank.pid) == os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert not run_dir.exists()


def test_the_token_of_another_ray_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"})
    use_private_ray(tmp_path)
    assert os.environ == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/ray_token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": "0",
        "RAY_memory_monitor_refresh_ms": "0",
    }


@pytest.mark.parametrize(("name", "is_kept"), [("short", True), ("long" * 20, False)])
def test_sockets_have_short_paths(name: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as root:
        parent = Path(root) / name
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        run_dir = make_run_dir()
        try:
            assert (run_dir.parent == parent) is is_kept
            session = run_dir / "ray" / "session_2026-11-24_08-05-50_796193_1234567"
            assert len(str(session / "sockets" / "plasma_store")) <= 107
        finally:
            run_dir.rmdir()
