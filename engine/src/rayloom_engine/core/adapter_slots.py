"""AdapterSlots: which LoRA adapters the ranks hold. A running sequence with an adapter uses that adapter's slot.

An adapter that no sequence uses stays in its slot until another adapter needs the slot; the one whose last use is
longest ago goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rayloom_engine.core.adapter import Adapter, AdapterLoad


class AdapterSlots:
    """The slots, by the adapters' digests."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[bytes, int] = {}  # digest -> slot; the adapter whose last use is longest ago first
        self._num_users: Counter[bytes] = Counter()  # digest -> sequences that use it; unused adapters are left out
        self._broken: set[bytes] = set()  # digests of adapters in slots that the ranks could not load
        self._loads: dict[int, Adapter] = {}  # slot -> adapter that the next plan tells the ranks to load

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def has_room(self, adapter: Adapter | None) -> bool:
        """True if a sequence with this adapter could run now: it is in a slot, or a slot is unused."""
        return adapter is None or adapter.digest in self._slots or len(self._num_users) < self._num_slots

    def use(self, adapter: Adapter | None) -> int:
        """Returns the slot of the adapter, and counts a user. Returns -1 for None. Call it only if there is room."""
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
        return slot

    def leave(self, adapter: Adapter | None) -> None:
        """Counts one user less."""
        if adapter is None:
            return
        self._num_users[adapter.digest] -= 1
        if not self._num_users[adapter.digest]:
            del self._num_users[adapter.digest]

    def could_not_load(self, adapter: Adapter) -> None:
        """Lets the ranks load the adapter again for its next user."""
        if adapter.digest in self._slots:
            self._broken.add(adapter.digest)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Returns what the ranks have to load before the next plan."""
        loads = tuple(AdapterLoad(slot, adapter) for slot, adapter in sorted(self._loads.items()))
        self._loads = {}
        return loads

    def forget_all(self) -> None:
        """Empties the slots, because the ranks are new. No sequence runs."""
        self._slots = {}
        self._num_users = Counter()
        self._broken = set()
        self._loads = {}

    def check_integrity(self, users: Iterable[Adapter | None]) -> None:
        """Raises AssertionError if slots contradict each other. `users`: the adapters of the running sequences."""
        assert self._num_users == Counter(each.digest for each in users if each is not None)
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
