"""Checks of the Ray that a server starts for itself: other users of the machine cannot use it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path

import psutil

from rt_server import RunningServer


def check_private_ray(server: RunningServer, home: Path) -> Path:
    """Fails if other users can read the token of the server's Ray or connect to it. Fails if Ray kills or slows ranks.

    `home`: the server's HOME. Returns the server's run folder.
    """
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    found = _listeners(processes)
    assert {"gcs_server", "raylet"} <= found.keys()
    assert not [each.cmdline() for each in processes if _is_named(each, "ray::Dashboard", "ray::RuntimeEnv")]
    assert {name for name, addresses in found.items() if not all(map(_is_loopback, addresses))} == set()
    assert not (home / ".ray").exists()

    line = server.children()["local_ray"].cmdline()
    run_dir = Path(line[line.index("--run-dir") + 1])
    assert oct(run_dir.stat().st_mode)[-3:] == "700"
    token = run_dir / "ray_token"
    assert oct(token.stat().st_mode)[-3:] == "600"
    assert len(token.read_text()) == 64
    # Ray makes the folders of its session writable for all users. So they must be within the run folder, which other
    # users cannot enter.
    assert (run_dir / "ray" / "session_latest" / "sockets" / "raylet").exists()

    (raylet,) = (each for each in processes if _is_named(each, "raylet"))
    assert raylet.environ()["RAY_memory_monitor_refresh_ms"] == "0", "a nearly full machine must not cost a rank"
    own = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert {os.getpriority(os.PRIO_PROCESS, rank["pid"]) for rank in server.status()["ranks"]} == {own}
    return run_dir


def _listeners(processes: list[psutil.Process]) -> dict[str, set[str]]:
    """Process -> the addresses at which it listens."""
    found: dict[str, set[str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses = {each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
            if addresses:
                found.setdefault(process.name(), set()).update(addresses)
    return found


def _is_named(process: psutil.Process, *beginnings: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith(beginnings)
    return False


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback
