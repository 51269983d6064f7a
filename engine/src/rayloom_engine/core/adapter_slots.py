"""AdapterSlots: which LoRA adapters the ranks hold. A running sequence with an adapter uses that adapter's slot.

An adapter that no sequence uses stays in its slot until another adapter needs the slot. The least recently used adapter
is evicted first.

Tenants (API keys) share the slots as they share the waiting queue: a tenant gets a further slot if the number of unused
slots is larger than the number of slots that the tenant uses. So a single tenant can use half of the slots, rounded up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from rayloom_engine.core.adapter import Adapter, AdapterLoad

_Key = TypeVar("_Key")


class AdapterSlots:
    """The adapter in each slot, and the number of running sequences that use it. Digests identify adapters."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[bytes, int] = {}  # digest -> slot; the least recently used adapter first
        self._num_users: Counter[bytes] = Counter()  # digest -> number of sequences that use the adapter; never 0
        # (tenant, digest) -> number of the tenant's sequences that use the adapter; never 0
        self._num_users_of: Counter[tuple[str, bytes]] = Counter()
        self._num_used_by: Counter[str] = Counter()  # tenant -> number of adapters that its sequences use
        self._broken: set[bytes] = set()  # digests of adapters that have a slot, but could not be loaded
        self._loads: dict[int, Adapter] = {}  # slot -> adapter that the next plan tells the ranks to load

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def has_room(self, adapter: Adapter | None) -> bool:
        """True if the adapter is in a slot, or a slot is unused."""
        return adapter is None or adapter.digest in self._slots or len(self._num_users) < self._num_slots

    def is_in_share(self, adapter: Adapter | None, tenant: str) -> bool:
        """True if the tenant may use the adapter: the adapter needs no further slot, or the tenant's share has room.

        `tenant` is empty unless there are several API keys. An empty tenant may use all slots.
        """
        if adapter is None or not tenant or adapter.digest in self._num_users:
            return True
        return self._num_used_by[tenant] < self._num_slots - len(self._num_users)

    def use(self, adapter: Adapter | None, tenant: str = "") -> int:
        """Counts one more sequence that uses the adapter, and returns the adapter's slot; -1 without an adapter.

        Call it only if `has_room` is true.
        """
        if adapter is None:
            return -1
        digest = adapter.digest
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = self._free_slot()
            self._loads[slot] = adapter
        elif digest in self._broken:
            self._loads[slot] = adapter
        self._broken.discard(digest)
        self._slots[digest] = slot
        self._num_users[digest] += 1
        self._num_users_of[tenant, digest] += 1
        if self._num_users_of[tenant, digest] == 1:
            self._num_used_by[tenant] += 1
        return slot

    def leave(self, adapter: Adapter | None, tenant: str = "") -> None:
        """Lowers the number of sequences that use the adapter by one."""
        if adapter is None:
            return
        _count_down(self._num_users, adapter.digest)
        _count_down(self._num_users_of, (tenant, adapter.digest))
        if (tenant, adapter.digest) not in self._num_users_of:
            _count_down(self._num_used_by, tenant)

    def could_not_load(self, adapter: Adapter) -> None:
        """Records a failed load. The ranks load the adapter again for the next sequence that uses the adapter."""
        if adapter.digest in self._slots:
            self._broken.add(adapter.digest)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Returns the adapters that the ranks have to load before the next plan."""
        loads = tuple(AdapterLoad(slot, adapter) for slot, adapter in sorted(self._loads.items()))
        self._loads = {}
        return loads

    def forget_all(self) -> None:
        """Empties all slots, because the ranks may have lost the adapters. No sequence may be running."""
        self._slots = {}
        self._num_users = Counter()
        self._num_users_of = Counter()
        self._num_used_by = Counter()
        self._broken = set()
        self._loads = {}

    def check_integrity(self, users: Iterable[tuple[str, Adapter | None]]) -> None:
        """Raises AssertionError if the slots and counts do not match `users`.

        `users`: tenant and adapter of each running sequence.
        """
        used = [(tenant, each.digest) for tenant, each in users if each is not None]
        assert self._num_users == Counter(digest for _, digest in used)
        assert self._num_users_of == Counter(used)
        assert self._num_used_by == Counter(tenant for tenant, _ in set(used))
        assert set(self._num_users) <= set(self._slots)
        assert self._broken <= set(self._slots)
        assert len(set(self._slots.values())) == len(self._slots) <= self._num_slots
        assert set(self._loads) <= set(self._slots.values())

    def _free_slot(self) -> int:
        if len(self._slots) < self._num_slots:
            return next(slot for slot in range(self._num_slots) if slot not in self._slots.values())
        evicted = next(digest for digest in self._slots if digest not in self._num_users)
        self._broken.discard(evicted)
        return self._slots.pop(evicted)


def _count_down(counter: Counter[_Key], key: _Key) -> None:
    """Lowers the count of a key by 1. Removes the key if its count is now 0."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
