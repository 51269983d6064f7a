"""ConnectionTable: how many connections a port may have, and which one makes room when there are more."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

MAX_CONNECTIONS = 4096  # far more than the engine can queue; each may hold 64 KiB of unfinished headers
ADMIN_CONNECTIONS = 64
OWN_FILES = 64  # the core's socket, logs, the model's files, what libraries open
WARN_EVERY_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionRoom:
    """How many connections the API port takes, and how many more the kernel may queue for it."""

    limit: int
    backlog: int


def connection_room(max_files: int) -> ConnectionRoom:
    """The API port's share of a process that may open `max_files` files.

    The admin port's connections and the process's own files always fit beside it, and so does a whole backlog that is
    accepted at once, before the first of those connections can be closed.
    """
    room = max(16, max_files - OWN_FILES - ADMIN_CONNECTIONS)
    limit = min(MAX_CONNECTIONS, room * 3 // 4)
    return ConnectionRoom(limit=limit, backlog=min(2048, room - limit))


class Connection(Protocol):
    """What the table needs of a connection."""

    def evict(self) -> None:
        """Close at once: no answer is owed to this client."""


class ConnectionTable:
    """The open connections of one port. Beyond `limit`, the one that has waited longest without a request is closed."""

    def __init__(self, limit: int, *, refuses: bool = True) -> None:
        """`refuses`: whether a new connection is refused when every other one is owed an answer."""
        self._limit = limit
        self._refuses = refuses
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # no whole request is there; the one that waits longest first
        self._warned_at = float("-inf")  # by time.monotonic

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> bool:
        """Books a new connection; False when there is no room for it."""
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
        """The headers and the body of a request are there, so an answer is owed."""
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """All answers are sent: from now on it waits."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def makes_progress(self, connection: Connection) -> None:
        """A body comes as fast as it must. When no answer is owed, those that wait for longer make room first."""
        if connection in self._waiting:
            self.waits(connection)

    def closed(self, connection: Connection) -> None:
        """Safe to call again."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at > WARN_EVERY_S:
            self._warned_at = now
            logger.warning("all %d connections are in use; those that wait longest are closed", self._limit)
