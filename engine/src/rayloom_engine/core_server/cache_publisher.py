"""CachePublisher: sends the engine's prefix index and load to fronts that choose between several engines."""

from __future__ import annotations

from collections.abc import Iterable

from rayloom_engine.core.cache_log import CacheLog
from rayloom_engine.core.engine import Engine
from rayloom_engine.core_server.sockets import CoreIo
from rayloom_engine.protocol.messages import HASH_BYTES, CacheChanges, CoreMessage, LoadReport

_SECONDS = 0.2  # seconds between two messages about the index or the load
PART_BLOCKS = 65_536  # blocks in each part of the whole index, half a megabyte


class CachePublisher:
    """Sends the changes of the prefix index and the load to the fronts that have subscribed. For the main thread.

    Until a front subscribes, nothing is recorded, counted or sent.
    """

    def __init__(self, engine: Engine, io: CoreIo, start: int) -> None:
        """`start`: a random number that identifies this start of the core."""
        self._engine = engine
        self._io = io
        self._start = start
        self._number = 0  # number of the last message with changes
        self._connections: set[int] = set()
        self._log = CacheLog()
        self._last_load: LoadReport | None = None
        self._due_s = 0.0

    def subscribe(self, connection: int) -> None:
        """Sends the whole index and the load to a front. From now on, the front also gets the changes of both."""
        pool = self._engine.scheduler.pool
        if not self._connections:
            self._log = pool.log = CacheLog()
        self._send_changes()  # The other fronts get all earlier changes first, so `_number` is the same for all fronts.
        self._connections.add(connection)
        hashes = pool.cached_hashes()
        num_parts = max(1, -(-len(hashes) // PART_BLOCKS))
        for part in range(num_parts):
            some = hashes[part * PART_BLOCKS : (part + 1) * PART_BLOCKS]
            self._io.send(connection, self._changes(added=_joined(some), part=part, num_parts=num_parts))
        self._io.send(connection, LoadReport(self._engine.load()))
        self._last_load = None  # The next `publish` sends the load to all fronts: the other fronts have an older load.

    def unsubscribe(self, connection: int) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._engine.scheduler.pool.log = None

    def publish(self, now_s: float) -> None:
        """Sends the changes of index and load, at most five times a second. Called before every step."""
        if not self._connections or now_s < self._due_s:
            return
        self._due_s = now_s + _SECONDS
        self._send_changes()
        load = LoadReport(self._engine.load())
        if load != self._last_load:
            self._last_load = load
            self._send(load)

    def _send_changes(self) -> None:
        added, removed = self._log.take()
        if added or removed:
            self._number += 1
            self._send(self._changes(added=_joined(added), removed=_joined(removed)))

    def _changes(self, added: bytes, removed: bytes = b"", part: int = 0, num_parts: int = 0) -> CacheChanges:
        return CacheChanges(
            start=self._start,
            number=self._number,
            block_size=self._engine.scheduler.config.block_size,
            added=added,
            removed=removed,
            part=part,
            num_parts=num_parts,
        )

    def _send(self, message: CoreMessage) -> None:
        for connection in self._connections:
            self._io.send(connection, message)


def _joined(hashes: Iterable[bytes]) -> bytes:
    return b"".join([content[:HASH_BYTES] for content in hashes])
