"""Executor `mp`: ranks are processes on this machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from rayloom_engine.config import EngineConfig
from rayloom_engine.launcher.fork_messages import MAX_MESSAGE_BYTES, Killed, KillRank, RankEnd, Ready, StartRank
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.worker.device_shares import rank_devices
from rayloom_engine.worker.machine import visible_devices

_FORK_SERVER = ("-P", "-m", "rayloom_engine.launcher.fork_server")  # arguments of Python
# The fork server must confirm a KillRank within this many seconds. Otherwise the fork server counts as hung and is
# killed.
_KILL_SECONDS = 5.0
_IMPORT_SECONDS = 120.0  # used instead of _KILL_SECONDS while the fork server imports
# Between two calls of `wait`, at most this many seconds count for _KILL_SECONDS. If more have passed, this process was
# stopped, and perhaps the fork server was stopped, too.
_MOST_PASSED_SECONDS = 1.0
_EXIT_SECONDS = 2.0  # the most seconds to wait for the end of a fork server that has closed its connection
# the most seconds to wait for the fork server at a stop; the supervisor waits longer for the launcher
_CLOSE_SECONDS = 0.7


class ProcessRanks:
    """Implements RankStarter. The ranks are children of a fork server and end when it ends."""

    def __init__(self, config: EngineConfig, run_dir: Path, core_address: str) -> None:
        self._config = config
        self._run_dir = run_dir
        self._core_address = core_address
        self._devices: list[str] = []  # rank -> its CUDA device; empty = all ranks compute on the CPU
        self._running: set[int] = set()
        self._patience: dict[int, float] = {}  # rank -> seconds left for the fork server to confirm the KillRank
        self._waited_at = time.monotonic()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # (process, connection to it)
        self._is_ready = False  # True once the fork server has finished its imports
        self._messages = msgspec.json.Decoder(Ready | Killed | RankEnd)

    def prepare(self, progress: Progress) -> None:
        """If there are accelerators, assigns them to the ranks. Raises ConfigError if there are too few.

        Returns once the fork server is ready or has ended. If it has ended, `start` will start another fork server.
        """
        if self._config.device != "cpu":
            self._devices = rank_devices(
                self._config,
                visible_devices(),
                self._config.world_size,
                subject=self._config.parallelism,
                remedy="lower one of them",
            )
        progress("import", 0, 0, "")
        self._start_server()
        if self._take(_IMPORT_SECONDS) is None:
            assert self._server is not None
            self._server[0].kill()
            self._lose_server(*self._server)

    def start(self, rank: int, incarnation: int) -> None:
        if self._server is None:
            self._start_server()
        self._running.add(rank)
        self._send(StartRank(rank, incarnation, self._devices[rank] if self._devices else None))

    def kill(self, rank: int) -> None:
        if rank in self._running:
            self._patience.setdefault(rank, _KILL_SECONDS if self._is_ready else _IMPORT_SECONDS)
            self._send(KillRank(rank))

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        ended = self._take(timeout_s) or []
        while (more := self._take(0.0)) is not None:
            ended += more
        # The passed time is counted after all messages are read, because a confirmation may have arrived while this
        # process was stopped.
        now = time.monotonic()
        passed = min(now - self._waited_at, _MOST_PASSED_SECONDS)
        self._waited_at = now
        self._patience = {rank: left - passed for rank, left in self._patience.items()}
        if self._server is not None and any(left < 0.0 for left in self._patience.values()):
            self._server[0].kill()
        return ended

    def close(self) -> None:
        if self._server is None:
            return
        process, line = self._server
        line.close()
        _end(process, _CLOSE_SECONDS)

    def _take(self, timeout_s: float) -> list[tuple[int, str]] | None:
        """Reads one message. Returns (rank, cause) of the ranks that it reports as ended; None if no message came."""
        poller = select.poll()
        if self._server is not None:
            poller.register(self._server[1], select.POLLIN)
        if not poller.poll(1000 * timeout_s):
            return None
        assert self._server is not None
        process, line = self._server
        try:
            content = line.recv(MAX_MESSAGE_BYTES)
        except ConnectionError:  # the fork server ended with unread orders; its last messages can still be read
            content = line.recv(MAX_MESSAGE_BYTES)
        if not content:
            return self._lose_server(process, line)
        message = self._messages.decode(content)
        if isinstance(message, Ready):
            self._is_ready = True
            return []
        if isinstance(message, Killed):
            # The kill is confirmed, so the fork server works. The rank itself may end later, because a driver, or the
            # release of much memory, may delay the end.
            self._patience.pop(message.rank, None)
            return []
        self._running.discard(message.rank)
        self._patience.pop(message.rank, None)
        return [(message.rank, NO_CORE if message.code == 0 else _cause(message.code))]

    def _lose_server(self, process: subprocess.Popen[bytes], line: socket.socket) -> list[tuple[int, str]]:
        line.close()
        cause = f"with its fork server: {_cause(_end(process, _EXIT_SECONDS))}"
        ended = [(rank, cause) for rank in sorted(self._running)]
        self._running.clear()
        self._patience.clear()
        self._server = None
        self._is_ready = False
        return ended

    def _start_server(self) -> None:
        line, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with end:
            arguments = ["--run-dir", str(self._run_dir), "--core-address", self._core_address]
            arguments += ["--line-fd", str(end.fileno()), "--parent", str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, *_FORK_SERVER, *arguments],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._server = process, line

    def _send(self, order: StartRank | KillRank) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):  # the fork server and its ranks have ended: `wait` will return them
            self._server[1].send(msgspec.json.encode(order))


def _end(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Waits for the end of a process and returns its exit code. Kills it after `patience_s`."""
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
