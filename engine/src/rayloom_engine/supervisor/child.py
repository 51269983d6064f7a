"""Child: one process that the supervisor starts, watches and restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.supervisor.prepared import PreparedProcess
from rayloom_engine.supervisor.spawn import spawn

_BUSY_SECONDS = 60.0  # for this many seconds after the last pulse, a thread that is busy counts as a sign of life
# States in /proc of busy threads: R runs or waits for a CPU, D waits for a page or a disk. The threads of a stopped
# process have T. If the threads of a process wait for each other, they have S.
_BUSY_STATES = "RD"
_START_SECONDS = 10.0  # the least value of hang_seconds while a child starts: the child may wait for a slow disk


class Child:
    """One supervised process, over all of its starts."""

    def __init__(self, name: str, budget: int, prepared: PreparedProcess | None = None) -> None:
        """`prepared`: the process for the first start, which has begun its imports; None: there is no such process."""
        self.name = name
        self._prepared = prepared
        self.starts = 0  # number of starts so far
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at: float | None = 0.0  # time of the next start, by time.monotonic; None while the process runs
        self.pulse: int | None = None  # read end of the pipe in which the process signals that it is alive
        self.alive_at: float | None = None  # time of the last sign of life, by time.monotonic; None = not watched
        self.is_up = False  # True if the last pulse said that the start is complete
        self.was_up = False  # True once any start was complete
        self._signalled_at = 0.0  # time of the last pulse, or of the start
        self._cpu_ticks = ""
        self._budget = RestartBudget(budget)

    def is_due(self, now: float) -> bool:
        """True if the process must be started now."""
        return self.start_at is not None and self.start_at <= now

    def start(self, module: str, arguments: Sequence[str], fds: Sequence[int] = ()) -> None:
        """Starts `python -m module` with a pipe for its signs of life; the process inherits `fds`.

        Raises OSError if the machine has too little memory, or no free process or file.
        """
        pulse, pulse_end = os.pipe()
        try:
            os.set_blocking(pulse, False)
            arguments = [*arguments, "--pulse-fd", str(pulse_end)]
            fds = [*fds, pulse_end]
            process = None if self._prepared is None else self._prepared.begin(arguments, fds)
            self._prepared = None
            if process is None:
                process = spawn(module, arguments, fds)
        except BaseException:
            os.close(pulse)
            raise
        finally:
            os.close(pulse_end)
        self.started(process, time.monotonic(), pulse)

    def started(self, process: subprocess.Popen[bytes], now: float, pulse: int | None = None) -> None:
        """Supervises a process that has just started. Without `pulse`, the process is not watched for signs of life."""
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
        """Reads the child's pulses.

        `was_away`: the supervisor itself was stopped for a while, so it may have missed signs of life.
        """
        has_pulse = False
        with contextlib.suppress(BlockingIOError):
            while self.pulse is not None and (data := os.read(self.pulse, 4096)):
                has_pulse = True
                self.alive_at = now
                self._signalled_at = now
                self.is_up = data.endswith(b"1")
                self.was_up = self.was_up or self.is_up
        if was_away:
            self._signalled_at = now
        is_busy = self._is_busy() and not has_pulse and now - self._signalled_at < _BUSY_SECONDS
        if self.alive_at is not None and (was_away or is_busy):
            self.alive_at = now

    def _is_busy(self) -> bool:
        """True if the process has used CPU time since the last call, or one of its threads is in a busy state.

        A busy process counts as alive for _BUSY_SECONDS after its last pulse. A call into a library may block the pulse
        thread, or the pulse thread may wait for a CPU on a machine with many busy processes.
        """
        if self.process is None:
            return False
        before, self._cpu_ticks = self._cpu_ticks, _cpu_ticks(self.process.pid)
        return self._cpu_ticks != before or _has_busy_thread(self.process.pid)

    def is_silent(self, now: float, hang_seconds: float) -> bool:
        """True if the child has shown no sign of life for longer than `hang_seconds` (longer while it starts)."""
        patience = hang_seconds if self.is_up else max(hang_seconds, _START_SECONDS)
        return self.alive_at is not None and now - self.alive_at > patience

    def could_not_start(self, now: float) -> bool:
        """Does the same as `died` for a process that the system could not start."""
        self.is_up = False  # so that the next attempt waits for the back-off
        return self.died(now)

    def died(self, now: float, is_trial: bool = False) -> bool:
        """Counts a death in the restart budget, and plans the restart. Returns False if the budget is spent.

        `is_trial`: the core died while it searched for the request that crashes it (core/suspicion.py). Such a death is
        not counted, because each such death leaves fewer suspects.
        """
        self.process = None
        wait = 0.0 if is_trial else self._budget.wait_after_death(now)
        # A process that died during its start is restarted after the back-off, any other process at once.
        self.start_at = None if wait is None else now + (0.0 if self.is_up else wait)
        return wait is not None


def cause_of(code: int) -> str:
    """Returns a process's exit code, or the signal that ended the process, in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _has_busy_thread(pid: int) -> bool:
    """True if a thread of the process has one of _BUSY_STATES. False if there is no /proc."""
    for thread in Path("/proc").glob(f"{pid}/task/*"):
        with contextlib.suppress(OSError):  # the thread has ended
            if _fields(thread / "stat")[0] in _BUSY_STATES:
                return True
    return False


def _cpu_ticks(pid: int) -> str:
    """Returns user and system CPU time as text, for comparison with a later value; empty if there is no /proc."""
    try:
        return " ".join(_fields(Path(f"/proc/{pid}/stat"))[11:13])
    except OSError:
        return ""


def _fields(stat: Path) -> list[str]:
    """Returns the fields of a stat file in /proc that follow the command: the state first."""
    return stat.read_text().rpartition(")")[2].split()
