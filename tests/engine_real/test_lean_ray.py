"""The Ray of the operator's pods: it has no agents and no dashboard, runs actors, and ends completely."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rt_ports import free_ports
from rt_server import wait_until

# Prints the process id of an actor.
DRIVER = """
import os, ray, sys
ray.init(address=sys.argv[1], configure_logging=False)

@ray.remote
class Rank:
    def pid(self):
        return os.getpid()

print(ray.get(Rank.remote().pid.remote()))
"""
ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64, "RAY_memory_monitor_refresh_ms": "0"}


@dataclass(frozen=True)
class Head:
    """A running head. `port`: the port of its control store."""

    command: psutil.Process
    port: int
    log: Path

    def processes(self) -> list[psutil.Process]:
        return self.command.children(recursive=True)

    def one(self, name: str) -> psutil.Process:
        (found,) = (each for each in self.processes() if each.name() == name)
        return found


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """The head that the operator's pods start, on ports that are free."""
    gcs, *others = free_ports(7)
    log = tmp_path / "log"
    names = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "metrics-export")
    ports = [f"--{name}-port={port}" for name, port in zip(names, others, strict=False)]
    flags = ["--head", "--block", f"--port={gcs}", f"--dashboard-agent-listen-port={others[5]}", *ports]
    flags += ["--include-dashboard=false", "--no-monitor", "--include-log-monitor=no", "--disable-usage-stats"]
    flags += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--object-store-memory=78643200"]
    with tempfile.TemporaryDirectory(prefix="lean", dir="/tmp") as folder, log.open("wb") as stream:
        command = [sys.executable, "-P", "-m", "rayloom_engine.launcher.lean_ray", "start", f"--temp-dir={folder}"]
        process = subprocess.Popen([*command, *flags], stdout=stream, stderr=stream, env=os.environ | ENVIRONMENT)
        try:
            wait_until(lambda: "will now block" in log.read_text() or process.poll() is not None, 120.0, log.read_text)
            assert process.poll() is None, log.read_text()
            yield Head(psutil.Process(process.pid), gcs, log)
        finally:
            for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                each.kill()
            process.kill()
            process.wait()


def test_a_head_runs_actors_without_agents_and_ends_with_its_raylet(head: Head) -> None:
    names = sorted(each.name() for each in head.processes())
    assert names == ["cat", "cat", "gcs_server", "raylet"]
    found = subprocess.run(
        [sys.executable, "-c", DRIVER, f"127.0.0.1:{head.port}"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().isdigit()

    raylet = head.one("raylet")
    agents = [each for each in raylet.children() if each.name() == "cat"]
    raylet.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(agents, timeout=60)[1] == [], "no agent outlives its raylet"
    wait_until(
        lambda: not head.command.is_running() or head.command.status() == psutil.STATUS_ZOMBIE, 60.0, head.log.read_text
    )
