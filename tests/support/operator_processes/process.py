"""Operators as local processes with a token of the chart's ServiceAccount, each behind its own proxy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from operator_processes.forked import ForkedOperator
from operator_processes.ports import operator_port
from operator_processes.proxy import Proxy
from simulated_nodes import addresses
from simulated_nodes.api_client import Document

_T = TypeVar("_T")

OPERATOR = (sys.executable, "-m", "rayloom_operator")
# The longest wait for a state. Most states come within seconds, but a small, busy machine takes many times longer.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials that the installed chart gives to its pods."""

    token: str
    key: str


class OperatorProcess:
    def __init__(
        self,
        server: Proxy | Document,
        credentials: Credentials,
        folder: Path,
        *arguments: str,
        command: tuple[str, ...] | None = None,
    ) -> None:
        """Starts an operator that connects to simulated engines.

        `server` is the operator's proxy, or the cluster entry of a kubeconfig. Only this operator uses `folder`, and
        the operator's log is in it. `arguments` are added to the arguments of every operator. `command` is a Python
        command line such as OPERATOR. Without `command` the process is forked.
        """
        folder.mkdir(parents=True)
        if isinstance(server, Proxy):
            self.proxy = server
            server = server.cluster
        self.log = folder / "log"
        self.health_port = operator_port()
        (folder / "key").write_text(credentials.key)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": credentials.token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
        environment |= {"KUBECONFIG": str(folder / "kubeconfig")}
        arguments = (*arguments, f"--key-file={folder / 'key'}", f"--health-port={self.health_port}")
        self.process = _start(command, arguments, environment, self.log)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """Sends SIGTERM. Returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def scrape(self) -> str:
        """The text of the operator's /metrics; empty while the operator does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def rss_mib(self) -> float:
        """Resident memory in MiB."""
        fields = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(fields.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def story(self) -> str:
        """The last 40 lines of the operator's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


def _start(
    command: tuple[str, ...] | None, arguments: tuple[str, ...], environment: dict[str, str], log: Path
) -> ForkedOperator | subprocess.Popen[bytes]:
    if command is None:
        return ForkedOperator(arguments, environment, log)
    python, *options = command
    with log.open("wb") as output:
        return subprocess.Popen(
            [python, addresses.__file__, *options, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def wait_for(
    read: Callable[[], _T | None], what: str, timeout_s: float = PATIENCE_S, story: Callable[[], object] | None = None
) -> _T:
    """Waits until `read` returns a true value, and returns this value. Fails after `timeout_s`, like `wait_until`."""
    found: list[_T | None] = []

    def has_found() -> bool:
        found[:] = [read()]
        return bool(found[0])

    wait_until(has_found, what, timeout_s, story)
    (value,) = found
    assert value is not None
    return value


def wait_until(
    is_so: object, what: str, timeout_s: float = PATIENCE_S, story: object = None, *, pause_s: float = 0.05
) -> float:
    """Waits until `is_so()` is true, and returns the seconds. Fails with `what` and `story()` after `timeout_s`.

    Checks that send many requests need a longer `pause_s`, so that they do not load the API server.
    """
    assert callable(is_so)
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began >= timeout_s:
            more = f"\n{story()}" if callable(story) else ""
            raise AssertionError(f"waited {timeout_s:g} s for {what}{more}")
        time.sleep(pause_s)
    return time.monotonic() - began
