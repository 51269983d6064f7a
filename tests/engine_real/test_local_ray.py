"""The Ray that a server starts for itself: no other user of the machine can read its token or connect to it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rayloom_engine.launcher.local_ray import use_private_ray
from rayloom_engine.supervisor.sockets import make_run_dir
from rt_private_ray import check_private_ray
from rt_server import running_server

ARGUMENTS = ("--executor", "ray", "--device", "cpu", "--num-kv-blocks", "64", "--threads", "1")


@pytest.mark.slow
def test_its_folder_goes_with_the_server(three_layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes the checks that test_rank_death.py makes on a server that is killed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another-cluster's")
    with running_server(tmp_path, "--model", three_layers, *ARGUMENTS) as server:
        run_dir = check_private_ray(server, tmp_path)
    assert not run_dir.exists()


def test_the_token_of_another_ray_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"})
    use_private_ray(tmp_path)
    assert os.environ == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/ray_token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
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
