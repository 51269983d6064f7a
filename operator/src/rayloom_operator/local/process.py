"""One `rayloom-engine serve` as a child process, in a session of its own, with its log in a file."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rayloom_operator.errors import EngineEnded, EngineUnavailable

COMMAND = "rayloom-engine"
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def find_engine(executable: str = sys.executable, path: str | None = None) -> Path:
    """The `rayloom-engine` command: beside this Python first, as both are installed together, then on PATH.

    Raises EngineUnavailable when it is in neither place.
    """
    beside = Path(executable).parent / COMMAND
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which(COMMAND, path=path)
    if found is None:
        raise EngineUnavailable(
            f"{COMMAND} is not installed: it is neither in {beside.parent} nor on PATH. "
            "Install it with: pip install ./engine"
        )
    return Path(found)


class EngineProcess:
    """A running engine. The session of its own keeps a terminal's Ctrl-C away from it: `stop` decides when it ends.

    Raises EngineUnavailable when `command` cannot be started.
    """

    def __init__(self, command: Path, config_path: Path, log_path: Path, environment: Mapping[str, str]) -> None:
        self.log_path = log_path
        with log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [command, "serve", "--config", config_path],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise EngineUnavailable(f"cannot start {command}: {error.strerror}") from error

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def ended(self, when: str) -> EngineEnded:
        """Waits for the engine to end by itself, then says how it did, with its exit code as a shell reports it."""
        code = self._process.wait()
        if code < 0:
            return EngineEnded(f"the engine was killed by {signal.Signals(-code).name} {when}", 128 - code)
        return EngineEnded(f"the engine exited with code {code} {when}", code)

    def stop(self, grace_s: float) -> bool:
        """Ends the engine; True if it ended within `grace_s` seconds of SIGINT, which ends its children in order.

        What is left of its group is killed then, and its children end with it. Returns when the engine is gone.
        """
        deadline = time.monotonic() + grace_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        ended_by_itself = self._process.poll() is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # The engine leads its group, so the group has its pid.
        except ProcessLookupError:
            pass  # Nothing of the group is left.
        except PermissionError:
            # macOS answers so for a group of zombies only; anything alive in it would be ours to signal.
            if not ended_by_itself:
                raise
        self._process.wait()
        return ended_by_itself

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines of the engine's log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]


def _end_with_parent() -> None:
    """Runs in the child: the kernel interrupts the engine if this process is killed and cannot stop it in order."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
