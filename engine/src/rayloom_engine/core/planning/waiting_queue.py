"""The waiting queue: one line of sequences for each tenant; tenants take turns.

All clients with the same API key are one tenant; without API keys there is only one tenant. The position of a waiting
sequence is the number of its tenant's sequences that are running or wait ahead of it. The sequence with the lowest
position comes first. So the k-th sequence of a tenant comes before the (k+1)-th sequence of every other tenant, however
many sequences the other tenant has sent. At equal positions, the tenant whose last admission is longest ago comes
first. Within a tenant the order is priority, then arrival.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping

from rayloom_engine.core.sequence import Sequence, order_of
from rayloom_engine.errors import QueueFull

_MAX_TENANTS = 1024  # limit of `_admissions`, in which the entries of replaced API keys stay


class WaitingQueue:
    """All waiting sequences, by tenant."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}  # tenant -> its sequences, sorted by order; no list is empty
        # Tenant -> number of its last admission, oldest first. The entry stays after the tenant's last sequence.
        # Otherwise a tenant that sends its requests one by one would always come first.
        self._admissions: dict[str, int] = {}
        self._num_admissions = 0
        self._size = 0
        self.num_tokens = 0  # tokens of all waiting sequences; a sequence's number of tokens changes only while it runs

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences: tenant by tenant, and within a tenant sorted by `Sequence.order`."""
        for line in self._lines.values():
            yield from line

    def tenants(self) -> Iterable[str]:
        """The tenants that have a waiting sequence."""
        return self._lines.keys()

    def num_of(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    def check_room(self, tenant: str, num_free_slots: int, max_queued: int) -> None:
        """Raises QueueFull if the queue, or the tenant's part of it, is full."""
        num_own = self.num_of(tenant)
        if self._size >= max_queued + num_free_slots:
            raise QueueFull(f"{self._size} sequences wait already, at most {max_queued + num_free_slots} may", 1)
        # Without API keys there is one tenant, and the queue is not shared.
        if tenant and not has_room(num_own, self._size, num_free_slots, max_queued):
            raise QueueFull(
                f"{num_own} sequences of this API key wait already, and the queue's other places are kept for other "
                "keys; try again when some of them run",
                1,
            )

    def add(self, sequence: Sequence) -> None:
        insort(self._lines.setdefault(sequence.tenant, []), sequence, key=order_of)
        self._size += 1
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        line = self._lines[sequence.tenant]
        line.remove(sequence)
        self._size -= 1
        self.num_tokens -= sequence.num_tokens
        if not line:
            del self._lines[sequence.tenant]

    def admit(self, sequence: Sequence) -> None:
        """Removes the sequence because it runs now. From now on, its tenant comes last at equal positions."""
        self.remove(sequence)
        self._num_admissions += 1
        self._admissions.pop(sequence.tenant, None)
        self._admissions[sequence.tenant] = self._num_admissions
        if len(self._admissions) > _MAX_TENANTS:
            # Drops the oldest entry. Its tenant still comes first, because tenants without an entry come first, too.
            del self._admissions[next(iter(self._admissions))]

    def in_turns(self, num_running: Mapping[str, int]) -> Iterator[tuple[int, Sequence]]:
        """Yields (position, sequence) of all waiting sequences, lowest position first.

        `num_running`: tenant -> number of its running sequences. The iteration yields the sequences that waited at its
        beginning, even if the queue is changed meanwhile.
        """
        lines = {tenant: tuple(line) for tenant, line in self._lines.items()}
        heap = [self._entry(num_running.get(tenant, 0), lines[tenant][0], 0) for tenant in lines]
        heapq.heapify(heap)
        while heap:
            position, _, _, _, index, sequence = heap[0]
            line = lines[sequence.tenant]
            if index + 1 < len(line):
                heapq.heapreplace(heap, self._entry(position + 1, line[index + 1], index + 1))
            else:
                heapq.heappop(heap)
            yield position, sequence

    def _entry(self, position: int, sequence: Sequence, index: int) -> tuple[int, int, float, int, int, Sequence]:
        # `sequence.number` is unique, so the heap never compares two sequences. Priority is left out, because it only
        # orders the sequences of one tenant.
        last_admission = self._admissions.get(sequence.tenant, 0)
        return position, last_admission, sequence.arrival, sequence.number, index, sequence


def has_room(num_own: int, num_waiting: int, num_free_slots: int, max_queued: int) -> bool:
    """True if a tenant that has `num_own` of the `num_waiting` waiting sequences may queue one more.

    A tenant may queue a sequence if the queue has more free places than this tenant occupies. So a single tenant can
    fill half of the queue. When k tenants send endlessly, max_queued / 2**k places (rounded down) remain for the
    others. Sequences that get a free slot in the next step are not counted.
    """
    num_free = max_queued - max(0, num_waiting - num_free_slots)
    return max(0, num_own - num_free_slots) < num_free
