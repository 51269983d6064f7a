"""Strangers: connections at the rank port whose peer has not proved yet that it has the token.

Each has a thread that waits for its greeting. Their number is bounded; when it is reached the oldest stranger is
disconnected in favour of the newest. A rank greets within milliseconds, so a stranger with many newer ones is no rank.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

_MAX_STRANGERS = 64
# Strangers of one address, so that a flood from one machine does not displace ranks of others. All ranks of a machine
# dial at once after a restart of the core, with two connections each.
_MAX_OF_HOST = 48


def crowded_out(hosts: Sequence[str]) -> int | None:
    """The index of the stranger to disconnect; None while there is room. `hosts`: of all strangers, the newest last."""
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
        """Counts a new connection, and disconnects another one where there is no room for both."""
        with self._lock:
            self._hosts[connection] = host
            index = crowded_out(list(self._hosts.values()))
            if index is None:
                return
            dropped = list(self._hosts)[index]
            del self._hosts[dropped]
            with contextlib.suppress(OSError):  # the peer has just disconnected itself
                # The thread that reads from it wakes up and closes it.
                dropped.shutdown(socket.SHUT_RDWR)

    def release(self, connection: socket.socket) -> None:
        """Counts the connection no longer: its peer has proved its identity, or is gone."""
        with self._lock:
            self._hosts.pop(connection, None)
