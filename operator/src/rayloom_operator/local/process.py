"""Runs `rayloom-engine serve` as a child process in its own session, with its log in a file."""

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
    """Returns the path of `rayloom-engine`: beside this Python's executable if it is there, and from PATH if not.

    Raises EngineUnavailable if it is in neither place.
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
    """A running engine. It has its own session, so Ctrl-C in the terminal does not reach it: `stop` ends the engine.

    Raises EngineUnavailable if `command` cannot be started.
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
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def wait(self, when: str) -> EngineEnded:
        """Waits until the engine exits. Returns the error to raise; its message ends with `when`."""
        code = self._process.wait()
        if code < 0:
            return EngineEnded(f"the engine was killed by {signal.Signals(-code).name} {when}", 128 - code)
        return EngineEnded(f"the engine exited with code {code} {when}", code)

    def stop(self, grace_s: float) -> bool:
        """Sends SIGINT, on which the engine stops its children, and waits up to `grace_s` seconds for its exit.

        Then kills the processes that are left in the engine's process group. Returns True if the engine exited in time.
        """
        deadline = time.monotonic() + grace_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        exited_in_time = self._process.poll() is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the engine leads its process group
        except ProcessLookupError:
            pass  # No process of the group is left.
        except PermissionError:
            # macOS raises this if only zombies are left in the group.
            if not exited_in_time:
                raise
        self._process.wait()
        return exited_in_time

    def log_tail(self, num_lines: int) -> list[str]:
        """Returns the last `num_lines` lines of the engine's log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]


def _end_with_parent() -> None:
    """Runs in the child process. Makes the kernel send the engine SIGINT if the parent dies without `stop`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
