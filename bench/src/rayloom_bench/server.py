"""Starts an engine or a peer for a measurement and stops it afterwards; measures its start-up time and memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayloom_bench.endpoint import Endpoint, EndpointError, call_json, first_model_name
from rayloom_engine.errors import EngineError
from rayloom_engine.status import EngineStatus

READY_POLL_S = 0.02  # seconds between checks; on average, half of this is added to a measured start
STOP_S = 15  # seconds after which a server is killed; an idle server stops in less than a second
LOG_LINES_SHOWN = 30


class ServerFailed(EngineError):
    """The server ended or did not become ready. The message holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A running server of OpenAI's API."""

    title: str = "rayloom-engine serve"  # name of the server in errors
    ready_path: str = "/ready"  # answers with a JSON object as soon as the server accepts requests
    process: subprocess.Popen[bytes]
    started_s: float  # time.perf_counter just before the process was started
    url: str
    log: Path

    def endpoint(self) -> Endpoint:
        """The endpoint for clients, with the model's name in the API. Raises EndpointError if it is not ready."""
        return Endpoint(base_url=self.url, model_name=first_model_name(self.url, {}))

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server accepts requests. Raises ServerFailed if the process ends or the time is over."""
        deadline = time.perf_counter() + timeout_s
        while True:
            code = self.process.poll()
            if code is not None:
                raise ServerFailed(f"{self.title} ended with exit code {code}:\n{self.log_end()}")
            try:
                call_json(f"{self.url}{self.ready_path}", timeout_s=5)
                return
            except EndpointError as error:
                if time.perf_counter() > deadline:
                    raise ServerFailed(
                        f"{self.title} was not ready after {timeout_s:g} s ({error}):\n{self.log_end()}"
                    ) from error
            time.sleep(READY_POLL_S)

    def pss_bytes(self) -> dict[str, int]:
        """`name pid` -> proportional set size of each of the server's processes; shared pages count once in the sum."""
        return tree_pss_bytes(self.process.pid)

    def cpu_seconds(self) -> float:
        """CPU seconds of the server's processes so far, with those of their descendants that have ended."""
        return tree_cpu_seconds(self.process.pid)

    def cpu_seconds_by_process(self) -> dict[str, float]:
        """`name pid` -> CPU seconds of each of the server's processes so far."""
        return tree_cpu_seconds_by_process(self.process.pid)

    def log_end(self) -> str:
        """The last LOG_LINES_SHOWN lines of the server's log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Server(ServerProcess):
    """A running `rayloom-engine serve`, which has an admin port."""

    admin_url: str

    def status(self) -> EngineStatus:
        """The document of /status at the admin port. Raises EndpointError."""
        return EngineStatus.model_validate(call_json(f"{self.admin_url}/status"))


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator[Server]:
    """Starts `rayloom-engine serve` on free ports with these flags. Ends it and its descendants at the end of the
    block."""
    port, admin_port = free_ports(2)
    command = [sys.executable, "-m", "rayloom_engine", "serve", *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--admin-host", "127.0.0.1", "--admin-port", str(admin_port)]
    with _running(command, None) as (process, started_s, log):
        yield Server(
            process=process,
            started_s=started_s,
            url=f"http://127.0.0.1:{port}",
            admin_url=f"http://127.0.0.1:{admin_port}",
            log=log,
        )


@contextmanager
def running_process(
    title: str, command: Sequence[str], environment: Mapping[str, str], *, port: int, ready_path: str
) -> Iterator[ServerProcess]:
    """Starts a command that serves at `port`. Ends it and its descendants at the end of the block."""
    with _running(command, environment) as (process, started_s, log):
        yield ServerProcess(
            title=title,
            ready_path=ready_path,
            process=process,
            started_s=started_s,
            url=f"http://127.0.0.1:{port}",
            log=log,
        )


@contextmanager
def running_gateway(
    folder: Path, engine_ports: Sequence[int], *, model_name: str, port: int, admin_port: int, timeout_s: float
) -> Iterator[ServerProcess]:
    """Starts `rayloom-engine gateway` for engines at these ports, and waits until it is ready. The key: `folder`/key.

    Raises ServerFailed.
    """
    command = [sys.executable, "-m", "rayloom_engine", "gateway", f"--key-file={folder / 'key'}"]
    command += [f"--engine=e{number}=127.0.0.1:{number}" for number in engine_ports]
    command += [f"--cache-dir={folder / 'cache'}", f"--served-model-name={model_name}"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--admin-port={admin_port}", "--log-level=warning"]
    started = running_process("rayloom-engine gateway", command, os.environ, port=port, ready_path="/ready")
    with started as gateway:
        gateway.wait_ready(timeout_s)
        yield gateway


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str] | None
) -> Iterator[tuple[subprocess.Popen[bytes], float, Path]]:
    """Yields the process, time.perf_counter just before its start, and the file with its output."""
    with tempfile.TemporaryDirectory(prefix="rayloom-bench-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:
            started_s = time.perf_counter()
            # A session of its own, so that Ctrl-C reaches only the bench, which then stops the server.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, started_s, log
        finally:
            stop_tree(process)


def stop_tree(process: subprocess.Popen[bytes], grace_s: float = STOP_S) -> None:
    """Ends a process by SIGTERM. After `grace_s` seconds, kills the process and its descendants by SIGKILL."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for member in alive:
        member.kill()  # psutil compares the start time, so a process that got the pid later is not killed
    psutil.wait_procs(alive)
    process.wait()


def tree_pss_bytes(pid: int) -> dict[str, int]:
    """`name pid` -> proportional set size in bytes of a process and each of its descendants."""
    parent = psutil.Process(pid)
    sizes = {}
    for process in (parent, *parent.children(recursive=True)):
        try:
            sizes[f"{_role(process)} {process.pid}"] = int(process.memory_full_info().pss)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # the process ended after it was listed
    return sizes


def tree_cpu_seconds_by_process(pid: int) -> dict[str, float]:
    """`name pid` -> CPU seconds, user and system, of a process and each of its descendants."""
    parent = psutil.Process(pid)
    seconds = {}
    for process in (parent, *parent.children(recursive=True)):
        try:
            seconds[f"{_role(process)} {process.pid}"] = sum(process.cpu_times()[:2])
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # the process ended after it was listed
    return seconds


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its descendants, including descendants that have ended."""
    parent = psutil.Process(pid)
    total = 0.0
    for process in (parent, *parent.children(recursive=True)):
        try:
            # user and system time of the process and of children that it has reaped
            total += sum(process.cpu_times()[:4])
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # the process ended after it was listed
    return total


def free_ports(count: int) -> tuple[int, ...]:
    """`count` ports of the loopback address on which no process listens now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return ports


def _role(process: psutil.Process) -> str:
    """The module that `python -m` runs, such as `rayloom_engine.front`; the process name for ranks and without `-m`."""
    arguments = process.cmdline()
    is_python = bool(arguments) and Path(arguments[0]).name.startswith("python")
    if is_python and "-m" in arguments[:-1] and not process.name().startswith("rank"):
        return arguments[arguments.index("-m") + 1]
    return process.name()
