"""ConnectionTable: limits the connections of a port, and picks the connection to close when there are too many."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

MAX_CONNECTIONS = 4096  # far more than the engine can queue; each connection may hold 64 KiB of unfinished headers
ADMIN_CONNECTIONS = 64
# number of files that the process itself opens: the core's socket, logs, the model's files, files of libraries
OWN_FILES = 64
WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionRoom:
    """Limits of the API port: for open connections, and for connections that wait in the kernel's queue (backlog)."""

    limit: int
    backlog: int


def connection_room(max_files: int) -> ConnectionRoom:
    """Returns the API port's share of `max_files`, the number of files that the process may open.

    The admin port's connections and the process's own files are set aside first. The backlog counts too: all of its
    connections may be accepted at once, before any of them can be closed.
    """
    room = max(16, max_files - OWN_FILES - ADMIN_CONNECTIONS)
    limit = min(MAX_CONNECTIONS, room * 3 // 4)
    return ConnectionRoom(limit=limit, backlog=min(2048, room - limit))


class Connection(Protocol):
    """The part of a connection that ConnectionTable uses."""

    def evict(self) -> None:
        """Closes the connection at once. Called only if it has no unanswered request."""


class ConnectionTable:
    """The open connections of one port.

    If there are more than `limit`, the table closes the connection that has had no request for the longest time.
    """

    def __init__(self, limit: int, *, refuses: bool = True) -> None:
        """`refuses`: whether to refuse a new connection if all others have unanswered requests."""
        self._limit = limit
        self._refuses = refuses
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # connections without a complete request, longest wait first
        self._warned_at = float("-inf")  # time.monotonic of the last warning

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> bool:
        """Adds a new connection. Returns False if it must be refused for lack of room."""
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) <= self._limit:
            return True
        self._warn()
        oldest = next(iter(self._waiting))
        if oldest is not connection:
            self.closed(oldest)
            oldest.evict()
            return True
        if self._refuses:
            self.closed(connection)
        return not self._refuses

    def has_request(self, connection: Connection) -> None:
        """Call when a whole request has arrived: from now on the connection is not closed to make room for others."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """Call when all answers are sent: the connection now waits for its next request."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def makes_progress(self, connection: Connection) -> None:
        """Call when a body arrives fast enough.

        If no answer is due, the waiting time of the connection starts again from zero.
        """
        if connection in self._waiting:
            self.waits(connection)

    def closed(self, connection: Connection) -> None:
        """Removes a connection. May be called several times."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            logger.warning("all %d connections are in use; the longest waiting ones are closed", self._limit)
