"""Runs `rayloom-engine serve` or `gateway` as a child process in its own session, with its log in a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayloom_operator.errors import EngineEnded, EngineUnavailable

COMMAND = "rayloom-engine"
_LOG_LINES_SHOWN = 30
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def find_engine() -> Path:
    """Returns the path of `rayloom-engine`: beside this Python's executable, or else from PATH.

    Raises EngineUnavailable if it is in neither place.
    """
    beside = Path(sys.executable).parent / COMMAND
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which(COMMAND)
    if found is None:
        raise EngineUnavailable(
            f"{COMMAND} is not installed: it is neither in {beside.parent} nor on PATH. "
            "Install it with: pip install ./engine"
        )
    return Path(found)


class LocalProcess:
    """A running engine or gateway. The process has its own session, so Ctrl-C in the terminal does not signal it.

    The process's output is appended to the file `log_path`. Raises EngineUnavailable if `arguments` cannot be started.
    """

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self.name = name  # name of the process in messages
        self.log_path = log_path
        with log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise EngineUnavailable(f"cannot start {arguments[0]}: {error.strerror}") from error

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def wait(self, when: str) -> EngineEnded:
        """Waits until the process exits. Returns the error to raise; its message ends with `when`."""
        code = self._process.wait()
        if code < 0:
            return EngineEnded(f"{self.name} was killed by {signal.Signals(-code).name} {when}", 128 - code)
        return EngineEnded(f"{self.name} exited with code {code} {when}", code)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, unless it has exited."""
        if not self.has_exited:
            self._process.send_signal(number)

    def stop(self, grace_s: float) -> bool:
        """Sends SIGINT, and waits up to `grace_s` seconds until the process has stopped its children and exited.

        Then kills the processes that are left in the process group. Returns True if the process exited in time.
        """
        deadline = time.monotonic() + grace_s
        self.send(signal.SIGINT)
        while not self.has_exited and time.monotonic() < deadline:
            time.sleep(0.02)
        exited_in_time = self.has_exited
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the process leads its process group
        except ProcessLookupError:
            pass  # No process of the group is left.
        except PermissionError:
            # macOS raises this if only zombies are left in the group.
            if not exited_in_time:
                raise
        self._process.wait()
        return exited_in_time

    def show_log(self) -> None:
        """Prints the end of the log to stderr."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        print(f"The last {len(lines)} lines of {self.name}'s log ({self.log_path}):", file=sys.stderr)
        # If there are several processes, each line begins with the process's name.
        prefix = "  " if " " in self.name else f"  {self.name} | "
        for line in lines:
            print(f"{prefix}{line}", file=sys.stderr)


def tell(text: str) -> None:
    """Prints a line to stderr, if the terminal still exists."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """Runs in the child process. Makes the kernel send the child SIGINT if the parent dies without `stop`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
