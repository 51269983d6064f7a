"""The real server as a subprocess, and a strict client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil

from rt_ports import free_ports

_MODULES = {
    "front": "front",
    "core": "core_server.process",
    "launcher": "launcher",
    "local_ray": "launcher.local_ray",
}

START_EVERY_S = 0.1  # seconds between two checks whether a server is ready


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    api_url: str
    admin_url: str
    log: Path
    client: httpx.Client = field(repr=False)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.client.get(f"{self.admin_url}/status").json()
        return document

    def children(self) -> dict[str, psutil.Process]:
        """Processes of the server by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                line = " ".join(child.cmdline())
                for role, module in _MODULES.items():
                    if f"rayloom_engine.{module} " in line:
                        found[role] = child
        return found

    def log_text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def running_server(
    folder: Path, *arguments: str, ready_seconds: float = 240.0, environ: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """`rayloom-engine serve` on free ports until the block ends. Prints the log if the server does not become ready.

    `environ`: further environment variables.
    """
    ports = free_ports(2)
    log = folder / "server.log"
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", str(ports[0]), "--admin-port", str(ports[1])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environ or {})}
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, *arguments], stdout=stream, stderr=stream, env=environment)
    api, admin = (f"http://127.0.0.1:{port}" for port in ports)
    with httpx.Client(timeout=180.0) as client:
        server = RunningServer(process, api, admin, log, client)
        try:
            wait_until(lambda: is_ready(server), ready_seconds, lambda: f"not ready:\n{log.read_text()}", START_EVERY_S)
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(60.0)


def files_with_copies(server: RunningServer) -> list[Path]:
    """The files with copies of KV blocks of a server whose core is its only rank: those of the core and of the rank."""
    mapped = {Path(each.path) for each in server.children()["core"].memory_maps()}
    files = sorted(file for file in mapped if file.name.startswith("rayloom-kv-"))
    assert [file.name.rpartition("-")[2] for file in files] == ["index", "rank0"]
    return files


def is_ready(server: RunningServer) -> bool:
    assert server.process.poll() is None, f"server ended:\n{server.log_text()}"
    try:
        return server.client.get(f"{server.api_url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(
    condition: Callable[[], bool], seconds: float, message: Callable[[], str], every_s: float = 0.02
) -> None:
    """Returns once `condition` holds; fails with `message` after `seconds`.

    `every_s`: the pause between checks, in seconds. While a server starts, checks that send it requests must not be
    frequent, because they delay the start.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(every_s)


@dataclass
class Stream:
    """A streamed completion, read while it runs. `failure`: HTTP error, error event, broken or incomplete stream."""

    endpoint: ClassVar[str] = "/v1/completions"
    logprobs: ClassVar[object] = 0  # with this value, a token has its own logprob and no alternatives

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # time.monotonic at each token
    finish_reason: str | None = None
    is_done: bool = False
    failure: str | None = None

    def run(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """Streams an answer with logprobs, so that tokens can be compared one by one. No retries."""
        request = {**body, "stream": True, "logprobs": self.logprobs}
        try:
            # verify=False, because every client would read certificates for 16 ms of CPU time. The first stream would
            # get ahead of the others in this time.
            with httpx.stream(
                "POST", f"{url}{self.endpoint}", json=request, headers=headers, timeout=120.0, verify=False
            ) as response:
                if response.status_code != 200:
                    self.failure = f"HTTP {response.status_code}: {response.read().decode()}"
                    return
                for line in response.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self.failure is None and not self.is_done:
            self.failure = "the stream ended without [DONE]"

    def _take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            self.failure = f"error event: {event['error']}"
            return
        for choice in event["choices"]:
            new = self.take_choice(choice)
            self.tokens += new
            self.times += [time.monotonic()] * len(new)
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def take_choice(self, choice: dict[str, Any]) -> list[str]:
        """Adds the text of an event. Returns the event's tokens."""
        self.text += choice["text"]
        return (choice.get("logprobs") or {}).get("tokens") or []
