"""Strangers: connections at the rank port that have not proved anything yet.

Each has a thread that waits for its greeting. Their number is bounded, and a newcomer always gets a place: the oldest
stranger loses its own. A rank greets within milliseconds: a stranger that many others came after is no rank.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

_MAX_STRANGERS = 64
# Of one address, so that a flood from one machine costs the ranks of others nothing. A machine's own ranks all dial at
# once after a restart of the core, with two connections each.
_MAX_OF_HOST = 48


def crowded_out(hosts: Sequence[str]) -> int | None:
    """The index of the stranger that has to go; None while there is room. `hosts`: of all of them, the newest last."""
    newest = hosts[-1]
    if hosts.count(newest) > _MAX_OF_HOST:
        return hosts.index(newest)
    return 0 if len(hosts) > _MAX_STRANGERS else None


class Strangers:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[socket.socket, str] = {}  # oldest first

    def admit(self, connection: socket.socket, host: str) -> None:
        """Counts a new connection, and hangs up on another one where there is no room for both."""
        with self._lock:
            self._hosts[connection] = host
            index = crowded_out(list(self._hosts.values()))
            if index is None:
                return
            dropped = list(self._hosts)[index]
            del self._hosts[dropped]
            with contextlib.suppress(OSError):  # it has just hung up itself
                # The thread that reads from it wakes up and closes it.
                dropped.shutdown(socket.SHUT_RDWR)

    def release(self, connection: socket.socket) -> None:
        """It has proved who it is, or is gone: it takes no place any more."""
        with self._lock:
            self._hosts.pop(connection, None)
