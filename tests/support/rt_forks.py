"""Processes of tests that start as forks of one process, which has imported their modules.

The imports of a rank or of a front take a second of CPU time, longer than most tests. A fork has the environment of the
test that starts it. There is one exception: modules that read environment variables at their import have the values of
the first test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import psutil

_PRELOAD = [
    "rayloom_engine.models.loader",
    "rayloom_engine.worker.loaded_rank",
    "rayloom_engine.front.process",
    "operator_processes.frozen_modules",  # the last one
]


class _Fork(ForkServerProcess):
    """A fork with the environment of its caller. By default, a fork would have the environment of the first test."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environ)
        super().run()


class _ForkingContext(ForkServerContext):
    Process = _Fork


def forking_context() -> ForkServerContext:
    """A context whose processes have imported the modules of ranks and fronts. All contexts share one fork server."""
    context = _ForkingContext()
    context.set_forkserver_preload(_PRELOAD)
    return context


class WarmForks:
    """A process that imports further modules once for all its forks. It can be the context of RankProcesses."""

    def __init__(self, *modules: str) -> None:
        self.Pipe = multiprocessing.Pipe
        self._connection, theirs = self.Pipe()
        self._process = forking_context().Process(target=_fork_on_demand, args=(modules, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> _WarmFork:
        assert daemon, "forks end with the process that has the other end of their pipes"
        return _WarmFork(self._connection, target, args)

    def close(self) -> None:
        self._connection.close()
        self._process.join(10.0)


class _WarmFork:
    """A fork, with the methods of multiprocessing.Process that tests use."""

    pid: int

    def __init__(self, connection: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._connection = connection
        self._call = (target, args)

    def start(self) -> None:
        self._connection.send(self._call)
        self.pid = self._connection.recv()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def is_alive(self) -> bool:
        return psutil.pid_exists(self.pid)

    def join(self, timeout_s: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait(timeout_s)


def _fork_on_demand(modules: Sequence[str], connection: Connection) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a fork would visit, and so copy, the objects of all these modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks that end
    while True:
        try:
            target, args = connection.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            try:
                target(*args)
            except EOFError:
                pass  # the test has ended
            except Exception:  # noqa: BLE001 - the stack frames below belong to another process
                traceback.print_exc()
            finally:
                os._exit(1)
        del args  # closes this process's copies of the fork's connections
        connection.send(pid)


class ForkedFront:
    """The process of a front, with the methods of subprocess.Popen that tests use. `listeners`: API and admin port."""

    def __init__(self, arguments: Sequence[str], listeners: tuple[socket.socket, socket.socket]) -> None:
        self._process: ForkServerProcess = forking_context().Process(
            target=_be_front, args=(arguments, *listeners, _Stderr())
        )
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, f"the front has not ended after {timeout_s} s"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


class _Stderr:
    """A copy of this process's stderr. Unpickling gives the number of a file descriptor in the other process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _number_of, (reduction.DupFd(2),)


def _number_of(file: Any) -> int:
    return int(file.detach())


def _be_front(arguments: Sequence[str], api: socket.socket, admin: socket.socket, stderr: int) -> None:
    from rayloom_engine.front.process import main

    os.dup2(stderr, 2)  # The stderr that this fork inherits is that of the fork server, and pytest has closed it.
    own = ["--api-fd", str(api.detach()), "--admin-fd", str(admin.detach()), "--parent", str(os.getppid())]
    sys.argv = ["front", *arguments, *own]
    sys.exit(main())
