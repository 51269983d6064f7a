"""Executor `mp`: ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.launcher.fork_server import MAX_MESSAGE_BYTES, KillRank, RankEnd, StartRank
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.progress import Progress
from rayloom_engine.worker.machine import visible_devices

_CLOSE_SECONDS = 5.0  # for the fork server to end, which may import just then


class ProcessRanks:
    """Implements RankStarter. The ranks are children of a fork server, and end with it."""

    def __init__(self, config: EngineConfig, run_dir: Path, core_address: str) -> None:
        self._config = config
        self._run_dir = run_dir
        self._core_address = core_address
        self._devices: list[str] = []  # CUDA devices, one a rank; empty = all compute on the CPU
        self._running: set[int] = set()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # the fork server, the line to it
        self._ends = msgspec.json.Decoder(RankEnd)

    def prepare(self, progress: Progress) -> None:
        """Gives each rank an accelerator of its own, where there are any. Raises ConfigError when they are too few."""
        if self._config.device == "cpu":
            return
        self._devices = visible_devices()
        if 0 < len(self._devices) < self._config.world_size:
            raise ConfigError(
                f"{self._config.parallelism}: {self._config.world_size} ranks need an accelerator each, and this "
                f"machine has {len(self._devices)}; lower one of them, or set device to cpu"
            )

    def start(self, rank: int, incarnation: int) -> None:
        if self._server is None:
            self._server = self._start_server()
        self._running.add(rank)
        self._send(StartRank(rank, incarnation, self._devices[rank] if self._devices else None))

    def kill(self, rank: int) -> None:
        if rank in self._running:
            self._send(KillRank(rank))

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        ended: list[tuple[int, str]] = []
        # After the first one only what is there already.
        while self._is_news(0.0 if ended else timeout_s):
            assert self._server is not None
            process, line = self._server
            message = b""
            with contextlib.suppress(ConnectionError):
                message = line.recv(MAX_MESSAGE_BYTES)
            if message:
                end = self._ends.decode(message)
                self._running.discard(end.rank)
                ended.append((end.rank, NO_CORE if end.code == 0 else _cause(end.code)))
                continue
            self._server = None
            line.close()
            process.kill()
            cause = f"with its fork server: {_cause(process.wait())}"
            ended += [(rank, cause) for rank in sorted(self._running)]
            self._running.clear()
        return ended

    def close(self) -> None:
        if self._server is None:
            return
        process, line = self._server
        line.close()
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _is_news(self, timeout_s: float) -> bool:
        lines = [] if self._server is None else [self._server[1]]
        return bool(select.select(lines, [], [], timeout_s)[0])

    def _start_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            arguments = ["--run-dir", str(self._run_dir), "--core-address", self._core_address]
            arguments += ["--line-fd", str(end.fileno())]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rayloom_engine.launcher.fork_server", *arguments],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return process, line

    def _send(self, order: StartRank | KillRank) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):  # it has ended, and its ranks with it: `wait` says so
            self._server[1].send(msgspec.json.encode(order))


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
