"""Real engines that accept gateways, and real gateways, each with processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rt_ports import free_port, free_ports
from rt_server import START_EVERY_S, wait_until

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
KEY = "a key that both sides have, for tests"


@dataclass
class Program:
    """A process group with a log."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the group at once, like the deletion of a pod with grace period 0."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30.0)

    def log_text(self) -> str:
        return self.log.read_text()


@dataclass
class Gateway(Program):
    """A running gateway."""

    api_url: str
    admin_url: str

    def engines(self) -> dict[str, Any]:
        """The `/engines` document, with the engines by name."""
        document = httpx.get(f"{self.admin_url}/engines", timeout=20.0).json()
        return {**document, "engines": {engine["name"]: engine for engine in document["engines"]}}

    def serving(self) -> set[str]:
        return {name for name, engine in self.engines()["engines"].items() if engine["state"] == "serving"}


def start(folder: Path, name: str, *arguments: str) -> Program:
    """`rayloom-engine ARGUMENTS` in a process group of its own."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "rayloom_engine", *arguments],
            stdout=stream,
            stderr=stream,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    return Program(process, log)


def write_key(folder: Path) -> Path:
    path = folder / "front-key"
    path.write_text(f"{KEY}\n")
    return path


@contextlib.contextmanager
def running_gateway(folder: Path, engines: dict[str, int], *arguments: str, name: str = "gateway") -> Iterator[Gateway]:
    """A gateway that is ready. `engines`: name -> port. The gateway's model is called m."""
    flags = [part for engine, port in engines.items() for part in ("--engine", f"{engine}=127.0.0.1:{port}")]
    flags += ["--served-model-name", "m", "--key-file", str(write_key(folder)), *arguments]
    with _running(folder, name, flags) as gateway:
        yield gateway


@contextlib.contextmanager
def running_gateway_of_models(folder: Path, models_file: Path) -> Iterator[Gateway]:
    """A gateway for the models in a file. At least one of the models is ready."""
    with _running(folder, "gateway", ["--models-file", str(models_file)]) as gateway:
        yield gateway


@contextlib.contextmanager
def _running(folder: Path, name: str, flags: list[str]) -> Iterator[Gateway]:
    api, admin = free_ports(2)
    flags = [*flags, "--port", str(api), "--admin-port", str(admin), "--cache-dir", str(folder / "cache")]
    program = start(folder, name, "gateway", *flags)
    gateway = Gateway(program.process, program.log, f"http://127.0.0.1:{api}", f"http://127.0.0.1:{admin}")
    try:
        wait_until(lambda: _is_ready(gateway), 120.0, lambda: f"not ready:\n{gateway.log_text()}", START_EVERY_S)
        yield gateway
    finally:
        gateway.kill()


def _is_ready(gateway: Gateway) -> bool:
    assert gateway.process.poll() is None, f"gateway ended:\n{gateway.log_text()}"
    try:
        return httpx.get(f"{gateway.api_url}/ready", timeout=20.0).status_code == 200
    except httpx.HTTPError:
        return False


class Engines:
    """Two engines that can be killed and restarted at the same ports."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """`arguments`: flags of both engines."""
        self.folder = folder
        self._arguments = arguments
        self.ports = {"first": free_port(), "second": free_port()}
        self._admin_ports = {name: free_port() for name in self.ports}
        self.programs: dict[str, Program] = {}

    def start(self, name: str) -> None:
        port, key = str(self.ports[name]), str(write_key(self.folder))
        flags = [
            "--port",
            "0",
            "--admin-port",
            str(self._admin_ports[name]),
            "--front-port",
            port,
            "--front-key-file",
            key,
        ]
        self.programs[name] = start(self.folder, name, "serve", *self._arguments, *flags)

    def counted(self) -> tuple[int, int, int]:
        """(finished requests, failed requests, first tokens), summed over the statuses of all engines."""
        each = [counted(f"http://127.0.0.1:{port}") for port in self._admin_ports.values()]
        finished, failed, first_tokens = map(sum, zip(*each, strict=True))
        return finished, failed, first_tokens

    def stop(self) -> None:
        for program in self.programs.values():
            program.kill()


def counted(admin_url: str) -> tuple[int, int, int]:
    """(finished requests, failed requests, first tokens) in a /status document."""
    requests = httpx.get(f"{admin_url}/status", timeout=20.0).json()["requests"]
    return requests["finished"], requests["failed"], requests["first_token_seconds"]["+Inf"]
