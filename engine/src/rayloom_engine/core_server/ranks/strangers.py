"""Strangers: connections whose peer has not yet proved that it has the token (rank port) or the key (gateways' port).

For each stranger, a thread or a coroutine waits for the greeting, so the number of strangers must be limited. A new
stranger beyond the limit disconnects the oldest. Ranks and gateways greet within milliseconds. So a stranger that is
older than many others cannot be a rank or a gateway.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

_MAX_STRANGERS = 64
# Limit of strangers from one address: a flood from one machine must not displace ranks of other machines. The limit
# allows all ranks of a machine to connect at once after a restart of the core, with two connections each.
_MAX_OF_HOST = 48


def crowded_out(hosts: Sequence[str]) -> int | None:
    """Returns the index of the stranger to disconnect; None if no limit is exceeded.

    `hosts`: the addresses of all strangers, the newest last.
    """
    newest = hosts[-1]
    if hosts.count(newest) > _MAX_OF_HOST:
        return hosts.index(newest)
    return 0 if len(hosts) > _MAX_STRANGERS else None


class Strangers:
    """The strangers of one port. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[socket.socket, str] = {}  # oldest first

    def admit(self, connection: socket.socket, host: str) -> None:
        """Adds a new connection. If this exceeds a limit, disconnects an older connection."""
        with self._lock:
            self._hosts[connection] = host
            index = crowded_out(list(self._hosts.values()))
            if index is None:
                return
            dropped = list(self._hosts)[index]
            del self._hosts[dropped]
            with contextlib.suppress(OSError):  # the peer has just disconnected itself
                # The thread or coroutine that reads from this connection wakes up and closes the connection.
                dropped.shutdown(socket.SHUT_RDWR)

    def release(self, connection: socket.socket) -> None:
        """Removes a connection: its peer has proved that it has the token or the key, or the peer is gone."""
        with self._lock:
            self._hosts.pop(connection, None)
