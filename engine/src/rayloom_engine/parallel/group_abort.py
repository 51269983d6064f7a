"""GroupAbort: ends a rank's waits for its peers from another thread. Without torch, so a rank of one stage may load it.

A thread that waits in a collective cannot abort it, and a peer that is stopped closes no connection. So the core sends
AbortOrders to a thread of its own in every rank (worker/rank_server.py), which calls this class.
"""

from __future__ import annotations

import threading
from typing import Protocol


class PeerWaits(Protocol):
    """The waits of one communication group, which another thread can end. `abort` may come after the last wait."""

    def abort(self) -> None:
        """Makes the present wait and all later ones raise RuntimeError. Waits for no peer itself. For any thread."""

    def release(self) -> None:
        """Frees what `abort` needs. `abort` is not called afterwards."""


class GroupAbort:
    """The waits of the process group that this rank has joined, and the last order that the core has aborted.

    The ticket of its Join order names a group, and tickets only increase. So an order that arrives late, after the rank
    has joined the next group, does nothing.
    """

    def __init__(self) -> None:
        # Held during `abort`: a file descriptor that an abort uses must not be closed meanwhile, because its number
        # could belong to another file then.
        self._lock = threading.Lock()
        self._ticket = 0  # of the Join order of the present group
        self._aborted = -1  # ticket of the last order that was aborted, with all orders before it
        self._waits: list[PeerWaits] = []

    def begin(self, ticket: int) -> None:
        """Forgets the group before. The waits that are added from now on are those of the group of this Join order."""
        self.forget()
        with self._lock:
            self._ticket = ticket

    def add(self, waits: PeerWaits) -> None:
        """Adds waits to the present group. Aborts them at once if the group is aborted already."""
        with self._lock:
            self._waits.append(waits)
            if self._ticket <= self._aborted:
                waits.abort()

    def abort(self, ticket: int) -> bool:
        """Aborts all orders up to the one with this ticket. Returns True if the present group was one of them.

        For any thread.
        """
        with self._lock:
            self._aborted = max(self._aborted, ticket)
            is_present = bool(self._waits) and self._ticket <= ticket
            if is_present:
                for waits in self._waits:
                    waits.abort()
            return is_present

    def forget(self) -> None:
        """Releases the waits of the present group. Call it before the process leaves the group."""
        with self._lock:
            for waits in self._waits:
                waits.release()
            self._waits = []
