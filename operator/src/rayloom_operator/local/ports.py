"""Ports on this machine: checks whether a port is free, and reserves ports for processes that may be restarted."""

from __future__ import annotations

import socket
import sys

from rayloom_operator.errors import EngineUnavailable


class ReservedPort:
    """A port that the system gives to no other process while this object is open.

    Children of this process can listen on the port. Port 0 picks a free port. Raises EngineUnavailable if the port
    cannot be used; `flag` is the flag that chooses the port.
    """

    def __init__(self, host: str, port: int = 0, flag: str = "") -> None:
        self.host = host
        try:
            self._socket = _bound(host, port)
        except OSError as error:
            raise EngineUnavailable(
                f"port {port} on {host} cannot be used ({error.strerror}); stop the process that uses it, or choose "
                f"another one with {flag} PORT (0 picks a free one)"
            ) from error
        self.number = int(self._socket.getsockname()[1])
        # This socket is bound and does not listen. On Linux this has two effects. A process of this run can listen on
        # the port, because the process's socket sets SO_REUSEADDR, too. And the system does not assign the port to
        # programs that ask for a free port. Other systems would refuse the process's socket.
        if sys.platform != "linux":
            self.close()

    def is_free(self) -> bool:
        """True if no process listens on the port."""
        try:
            _bound(self.host, self.number).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def claimable_port(host: str, port: int, flag: str, other_than: int | None = None) -> int:
    """Returns `port`, or a free port if `port` is 0. Raises EngineUnavailable if the port cannot be bound."""
    if port == other_than:
        raise EngineUnavailable(f"port {port} is given twice; choose another one with {flag} PORT")
    reserved = ReservedPort(host, port, flag)
    reserved.close()
    # For port 0 the system picks a free port. If that is the port of the other flag, the system picks again.
    return reserved.number if reserved.number != other_than else claimable_port(host, port, flag, other_than)


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Servers set this option too. Without it, closed connections of an earlier run would make the port look busy.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
