"""PreparedProcess: a child whose imports begin before its arguments are known.

`rayloom-engine serve` starts the EngineCore process ("core") in this way before it imports and reads the settings
itself, so that the imports of both processes run beside each other. Only the first start of a core is prepared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence

from rayloom_engine.common.orders import ORDERS_FLAG, SENDER_FLAG
from rayloom_engine.supervisor.spawn import spawn


class PreparedProcess:
    """A process `python -m module` that waits for its arguments, in one order.

    Its command line names this process for as long as it runs, and the process ends with this one.
    """

    def __init__(self, module: str) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            flags = [ORDERS_FLAG, str(theirs.fileno()), SENDER_FLAG, str(os.getpid())]
            self._process = spawn(module, flags, [theirs.fileno()])

    def begin(self, arguments: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Sends the process its arguments and copies of `fds`; returns None if the process has ended meanwhile.

        The values of flags that end in "-fd" must be in `fds`; the process replaces them by the numbers of its copies.
        """
        order = json.dumps({"arguments": list(arguments), "fds": list(fds)}).encode()
        try:
            socket.send_fds(self._orders, [order], fds)
        except OSError:
            self.discard()
            return None
        self._orders.close()
        return self._process

    def discard(self) -> None:
        """Ends a process that has not begun. Does nothing if it has."""
        if self._orders.fileno() < 0:
            return
        self._orders.close()
        self._process.kill()
        self._process.wait()


def prepared_core(arguments: Sequence[str]) -> PreparedProcess | None:
    """Returns the core of the server that the command line will start; None for other commands and for --help."""
    if not arguments or arguments[0] != "serve" or "--help" in arguments or "-h" in arguments:
        return None
    return PreparedProcess("rayloom_engine.core_server.process")
