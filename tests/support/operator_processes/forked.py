"""Operators forked from a process that has imported the operator.

The import takes a second of CPU time, and tests start some two hundred operators. Tests of pods, of the chart and of
the command `rayloom-operator` start the real command.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from simulated_nodes import addresses


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["rayloom_operator.__main__", "rayloom_operator.cli.run", "operator_processes.frozen_modules"]
    )
    return context


class ForkedOperator:
    """`rayloom-operator` with these arguments and this environment. The file `log` gets its output.

    The interface is that of subprocess.Popen. If two threads call `wait` at the same time, one of them may get the exit
    code 255.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.touch(0o600)
        asked = (tuple(arguments), dict(environment), str(log))
        self._process = _context().Process(target=_run, args=asked, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        # The fork server reaps the process at the end of the process. Soon afterwards another process may get the same
        # id.
        self._process_fd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._process_fd)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process still runs. May be called from any thread."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process_fd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(arguments: tuple[str, ...], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["rayloom-operator", *arguments]
    addresses.redirect()
    from rayloom_operator.__main__ import main

    sys.exit(main())
