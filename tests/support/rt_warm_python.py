"""Python programs of tests that start as forks of a process which has imported their modules.

The imports of a command take several times as much CPU time as the command itself. Each fork has the environment, the
streams and the exit of a separate interpreter. There is one exception: modules that read the environment at their
import have read the environment of the first test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_ORDER_BYTES = 1 << 17
_NUMBER = struct.Struct("i")  # a process id, and later its exit code


class WarmPython:
    """A process that has imported `modules`, from which programs are forked. It ends with this process."""

    def __init__(self, *modules: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def start(
        self,
        function: str,
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str],
        executable: object = sys.executable,
        stdout: int,
        stderr: int,
    ) -> WarmProcess:
        """Calls "MODULE:FUNCTION" in a fork, in a session of its own. The function's result is the exit code.

        `arguments`: sys.argv[1:] of the fork. `executable`: its sys.executable.
        """
        order = {
            "function": function,
            "arguments": list(map(str, arguments)),
            "environment": dict(environment),
            "executable": str(executable),
        }
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._line, [json.dumps(order).encode()], [stdout, stderr, theirs.fileno()])
        return WarmProcess(reply)


class WarmProcess:
    """A fork, with the attributes and methods of subprocess.Popen that tests use."""

    def __init__(self, reply: socket.socket) -> None:
        self._reply = reply
        self.pid = self._read()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reply], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = self._read()
            self._reply.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self) -> int:
        message = self._reply.recv(_NUMBER.size)
        assert message, "the process that forks programs has ended"
        return int(_NUMBER.unpack(message)[0])


@functools.cache
def warm_python(*modules: str) -> WarmPython:
    """The process for `modules`. All tests of this process share it."""
    return WarmPython(*modules)


def _fork_on_demand(line: socket.socket) -> Callable[[], Any] | None:
    """Forks until the other end of `line` is closed, then kills all forks. In a fork, returns the function to call."""
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process id, socket for its exit code
    while True:
        readable, _, _ = select.select([line, *running], [], [])
        for end in readable:
            if end is not line:
                _, reply = running.pop(end)
                # The process stays a zombie, because tests read its files in /proc.
                found = os.waitid(os.P_PIDFD, end, os.WEXITED | os.WNOWAIT)
                assert found is not None
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                os.close(end)
                with reply:
                    _tell(reply, code)
        if line not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(line, _MAX_ORDER_BYTES, 3)
        if not message:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            return None
        stdout, stderr, answer = descriptors
        reply = socket.socket(fileno=answer)
        pid = os.fork()
        if pid == 0:
            for own in (line, reply, *(each for _, each in running.values())):
                own.close()
            for end in running:
                os.close(end)
            return _prepared(json.loads(message), stdout, stderr)
        os.close(stdout)
        os.close(stderr)
        running[os.pidfd_open(pid)] = pid, reply
        _tell(reply, pid)


def _tell(reply: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the test has ended
        reply.send(_NUMBER.pack(number))


def _prepared(order: dict[str, Any], stdout: int, stderr: int) -> Callable[[], Any]:
    """Gives this fork its streams and its environment, and the signal handlers of a new interpreter."""
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for own in {stdout, stderr}:
        os.close(own)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in a process under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.executable = order["executable"]
    module, _, name = order["function"].partition(":")
    sys.argv = [module, *order["arguments"]]
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _main() -> object:
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    function = _fork_on_demand(line)
    return function() if function is not None else 0


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which a separate interpreter would not have
    sys.exit(_main())
