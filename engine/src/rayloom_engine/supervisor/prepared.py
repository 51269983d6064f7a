"""PreparedProcess: a child whose imports begin before its arguments are known.

`rayloom-engine serve` starts the EngineCore process ("core") in this way, and then imports its own modules and reads
the settings. So the imports of both processes run in parallel. A restart of the core works without a PreparedProcess.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence

from rayloom_engine.common.late_arguments import ARGUMENTS_FD_FLAG, SENDER_FLAG
from rayloom_engine.supervisor.spawn import spawn


class PreparedProcess:
    """A process `python -m module` that waits for one message with its arguments.

    The command line of the started process contains the id of this process. So when this process ends, the started
    process can end, too.
    """

    def __init__(self, module: str) -> None:
        self._sender, theirs = socket.socketpair()
        with theirs:
            flags = [ARGUMENTS_FD_FLAG, str(theirs.fileno()), SENDER_FLAG, str(os.getpid())]
            self._process = spawn(module, flags, [theirs.fileno()])

    def begin(self, arguments: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes] | None:
        """Sends the process its arguments and copies of `fds`; returns None if the process has ended meanwhile.

        If the name of a flag ends in "-fd", its value must be in `fds`. The process replaces each of these values by
        the number of its copy.
        """
        message = json.dumps({"arguments": list(arguments), "fds": list(fds)}).encode()
        try:
            socket.send_fds(self._sender, [message], fds)
        except OSError:
            self.discard()
            return None
        self._sender.close()
        return self._process

    def discard(self) -> None:
        """Ends the process, because it is not needed. Does nothing after `begin`."""
        if self._sender.fileno() < 0:
            return
        self._sender.close()
        self._process.kill()
        self._process.wait()


def prepared_core(arguments: Sequence[str]) -> PreparedProcess | None:
    """Returns the core of the server that the command line will start; None for other commands and for --help.

    In a job (executor external), only the process of rank 0 has a core.
    """
    if not arguments or arguments[0] != "serve" or "--help" in arguments or "-h" in arguments:
        return None
    if os.environ.get("RANK", "0") != "0":
        return None
    return PreparedProcess("rayloom_engine.core_server.process")
