"""Child: one process that the supervisor starts, watches and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.common.restarts import RestartBudget

_BUSY_SECONDS = 60.0  # CPU time counts as a sign of life for so long after the last signal in the pipe
_START_SECONDS = 10.0  # least patience with a child that is not up yet: it may wait so long for a disk


class Child:
    """A supervised process. `starts` counts from 1."""

    def __init__(self, name: str, budget: int) -> None:
        self.name = name
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at: float | None = 0.0  # due time of the next start by time.monotonic; None while it runs
        self.pulse: int | None = None  # read end of the pipe for its signals
        self.alive_at: float | None = None  # last sign of life by time.monotonic; None = not watched
        self.is_up = False  # by its last signal
        self._signalled_at = 0.0  # time of its last signal, or of its start
        self._cpu_ticks = ""
        self._budget = RestartBudget(budget)

    def is_due(self, now: float) -> bool:
        """True if it is to be started now."""
        return self.start_at is not None and self.start_at <= now

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
        """Starts `python -m module` with a pipe for its signals; the process inherits `fds`."""
        pulse, pulse_end = os.pipe()
        os.set_blocking(pulse, False)
        process = spawn(module, [*arguments, "--pulse-fd", str(pulse_end)], [*fds, pulse_end])
        os.close(pulse_end)
        self.started(process, time.monotonic(), pulse)

    def started(self, process: subprocess.Popen[bytes], now: float, pulse: int | None = None) -> None:
        """Takes over a process that has started. Without a pipe it is not watched for signs of life."""
        if self.pulse is not None:
            os.close(self.pulse)
        self.process = process
        self.pulse = pulse
        self.alive_at = None if pulse is None else now
        self._signalled_at = now
        self.is_up = False
        self.starts += 1
        self.start_at = None

    def listen(self, now: float, was_away: bool) -> None:
        """Reads its signals. `was_away`: the supervisor itself was stopped for a while, so signals may be missing."""
        with contextlib.suppress(BlockingIOError):
            while self.pulse is not None and (data := os.read(self.pulse, 4096)):
                self.alive_at = now
                self._signalled_at = now
                self.is_up = data.endswith(b"1")
        if was_away:
            self._signalled_at = now
        # CPU time is a sign of life for a while: a call into a library may keep the pulse thread from running.
        cpu_ticks = "" if self.process is None else _cpu_ticks(self.process.pid)
        is_busy = cpu_ticks != self._cpu_ticks and now - self._signalled_at < _BUSY_SECONDS
        if self.alive_at is not None and (was_away or is_busy):
            self.alive_at = now
        self._cpu_ticks = cpu_ticks

    def is_silent(self, now: float, hang_seconds: float) -> bool:
        """True if it has shown no sign of life for longer than allowed."""
        patience = hang_seconds if self.is_up else max(hang_seconds, _START_SECONDS)
        return self.alive_at is not None and now - self.alive_at > patience

    def died(self, now: float, is_trial: bool = False) -> bool:
        """Counts a death, unless it narrows suspects down (`is_trial`).

        Returns False when the restart budget is exhausted.
        """
        self.process = None
        wait = 0.0 if is_trial else self._budget.wait_after_death(now)
        # A back-off is for processes that die in their start; the deaths of others are bounded by the budget alone.
        self.start_at = None if wait is None else now + (0.0 if self.is_up else wait)
        return wait is not None


def spawn(module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_ignore_sigint,
    )


def cause_of(code: int) -> str:
    """The exit code of a process in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _ignore_sigint() -> None:
    """Runs in the child: a stop signal during its imports must not end in the trace of a KeyboardInterrupt.

    The front sets a handler of its own once it can stop in order.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _cpu_ticks(pid: int) -> str:
    """User and system CPU time as text, to compare with a later one; always empty where there is no /proc."""
    try:
        return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    except OSError:
        return ""
