"""ConnectionTable: the limit of a port's connections, and the connection that is closed when there are more."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

MAX_CONNECTIONS = 4096  # far more than the engine can queue; each may hold 64 KiB of unfinished headers
ADMIN_CONNECTIONS = 64
OWN_FILES = 64  # the core's socket, logs, the model's files, files of libraries
WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionRoom:
    """Number of connections that the API port accepts, and of further ones that the kernel may queue."""

    limit: int
    backlog: int


def connection_room(max_files: int) -> ConnectionRoom:
    """The API port's share of a process that may open `max_files` files.

    The admin port's connections and the process's own files always fit beside it. A whole backlog fits too, which may
    be accepted at once, before the first of its connections can be closed.
    """
    room = max(16, max_files - OWN_FILES - ADMIN_CONNECTIONS)
    limit = min(MAX_CONNECTIONS, room * 3 // 4)
    return ConnectionRoom(limit=limit, backlog=min(2048, room - limit))


class Connection(Protocol):
    """A connection as the table needs it."""

    def evict(self) -> None:
        """Closes the connection at once: no answer is owed to this client."""


class ConnectionTable:
    """The open connections of one port. Beyond `limit`, the longest waiting one without a request is closed."""

    def __init__(self, limit: int, *, refuses: bool = True) -> None:
        """`refuses`: whether a new connection is refused when an answer is owed to all others."""
        self._limit = limit
        self._refuses = refuses
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # connections without a whole request, the longest waiting first
        self._warned_at = float("-inf")  # by time.monotonic

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> bool:
        """Adds a new connection; False when there is no room for it."""
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
        """A whole request has arrived, so an answer is owed."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """All answers are sent: the connection waits for a request from here on."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def makes_progress(self, connection: Connection) -> None:
        """A body arrives fast enough: the connection counts as waiting only since now, if no answer is owed."""
        if connection in self._waiting:
            self.waits(connection)

    def closed(self, connection: Connection) -> None:
        """Removes a connection. Safe to call again."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            logger.warning("all %d connections are in use; the longest waiting ones are closed", self._limit)
