"""GroupAbort: ends a rank's waits for its peers, from another thread.

A thread that waits in a collective cannot abort the collective, and a stopped peer closes no connection. So the core
sends AbortOrders to every rank. There, a separate thread receives the message (worker/rank_server.py) and calls this
class. This module imports no torch, so that a rank without peers can import it.
"""

from __future__ import annotations

import threading
from typing import Protocol


class PeerWaits(Protocol):
    """The waits of one communication group, which another thread can end. `abort` may be called after the last wait."""

    def abort(self) -> None:
        """Makes the present wait and all later waits raise RuntimeError. Does not wait. Any thread may call it."""

    def release(self) -> None:
        """Frees the resources that `abort` uses. `abort` is not called afterwards."""


class GroupAbort:
    """The waits of the process group that this rank has joined, and the last order that the core has aborted.

    A group is identified by the ticket of its Join order, and later orders have higher tickets. So an Abort that
    arrives after the rank has joined the next group does nothing.
    """

    def __init__(self) -> None:
        # Held during `abort`. Otherwise another thread could close a file descriptor that `abort` uses, and the number
        # could then belong to another file.
        self._lock = threading.Lock()
        self._ticket = 0  # ticket of the Join order of the present group
        self._aborted = -1  # all orders up to this ticket are aborted
        self._waits: list[PeerWaits] = []

    def begin(self, ticket: int) -> None:
        """Forgets the previous group. Waits that are added later belong to the group of the Join order `ticket`."""
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
        """Aborts all orders up to this ticket. Returns True if this has ended the waits of the present group.

        Any thread may call it.
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
