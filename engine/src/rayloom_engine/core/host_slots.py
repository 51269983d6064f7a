"""HostSlots: the copies of KV blocks in host memory, and the order in which they are evicted.

Every rank has the same number of host slots, places in its host memory with room for the rank's part of one block. The
same host slot of all ranks has the parts of the same block. In this module and in host_tier.py, a slot is a host slot,
never the slot of a running sequence. A copy is in one of these states:

  storing   a plan in flight writes the slot on every rank; nothing reads it
  stored    all ranks have written their slots; the copy may be loaded: by every sequence if it is proven, else by its
            prover alone
  dropped   not in the index any more; its slot is free as soon as no plan in flight reads or writes it

A stored copy is evicted only if it is idle: no running sequence uses its block, and no plan in flight loads it. So a
prompt that is longer than the host memory does not evict its own beginning. Idle copies are evicted
least-recently-used first. As in block_pool.py, a sequence releases the end of its prefix first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol


class SavedIndex(Protocol):
    """Remembers the copies that every sequence may load, so that the next EngineCore process finds them."""

    def keep(self, slot: int, content: bytes) -> None:
        """Records that the slot has the block with this content."""

    def drop(self, slot: int) -> None:
        """Records that the slot has no usable block."""

    def entries(self) -> list[tuple[int, bytes]]:
        """Returns (slot, content) of all slots with a usable block."""


@dataclass(slots=True, eq=False)
class HostCopy:
    """A copy of a block. `content`: the hash of the block's content."""

    content: bytes
    slot: int
    # Number of the sequence whose finite logits will prove the copy; None once it is proven. Until then, only this
    # sequence may load it, because it may hold a NaN (see block_pool.py).
    prover: int | None
    is_storing: bool = True
    is_dropped: bool = False
    num_loads: int = 0  # plans in flight that load the copy

    @property
    def is_shareable(self) -> bool:
        """True if every sequence may load the copy."""
        return not self.is_storing and not self.is_dropped and self.prover is None


class HostSlots:
    """`num_slots` slots, and an index of the copies in them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.saved_index: SavedIndex | None = None
        # `on_shareable` is called when every sequence may load a copy from now on, `on_unshareable` when this copy is
        # dropped.
        self.on_shareable: Callable[[bytes], None] = lambda _: None
        self.on_unshareable: Callable[[bytes], None] = lambda _: None
        self._copies: dict[bytes, HostCopy] = {}  # all copies that are not dropped
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # evictable copies; the first is evicted first
        self._holders: Counter[bytes] = Counter()  # content -> running sequences that use the block; never 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def find(self, content: bytes) -> HostCopy | None:
        """Returns the copy with this content, stored or storing."""
        return self._copies.get(content)

    def is_shareable(self, content: bytes) -> bool:
        copy = self._copies.get(content)
        return copy is not None and copy.is_shareable

    def shareable_contents(self) -> list[bytes]:
        return [content for content, copy in self._copies.items() if copy.is_shareable]

    def may_load(self, content: bytes, number: int) -> bool:
        """True if the sequence with this number may load a copy with this content."""
        copy = self._copies.get(content)
        return copy is not None and not copy.is_storing and copy.prover in (None, number)

    def try_add(self, content: bytes, prover: int | None) -> HostCopy | None:
        """Returns a new copy in the state storing; None if every slot is in use. May evict an idle copy.

        There must be no copy with this content.
        """
        assert content not in self._copies
        if not self._free and self._idle:
            self.drop(next(iter(self._idle)))
        if not self._free:
            return None
        copy = self._copies[content] = HostCopy(content, self._free.pop(), prover)
        return copy

    def restore(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Adds stored copies that an earlier EngineCore process has recorded. All slots must be free."""
        assert len(self._free) == self.num_slots
        taken = set()
        for slot, content in entries:
            if slot < self.num_slots and slot not in taken and content not in self._copies:
                taken.add(slot)
                self._copies[content] = HostCopy(content, slot, None, is_storing=False)
                self._idle[content] = None
                self.on_shareable(content)
            elif self.saved_index is not None:
                self.saved_index.drop(slot)
        self._free = [slot for slot in self._free if slot not in taken]

    def stored(self, copy: HostCopy) -> None:
        """Records that all ranks have written the copy."""
        copy.is_storing = False
        self._note_shareable(copy)
        self._settle(copy)

    def prove(self, copy: HostCopy) -> None:
        """Records that finite logits were computed from the block."""
        copy.prover = None
        self._note_shareable(copy)

    def begin_load(self, copy: HostCopy) -> None:
        copy.num_loads += 1
        self._settle(copy)

    def end_load(self, copy: HostCopy) -> None:
        copy.num_loads -= 1
        self._settle(copy)

    def hold(self, contents: Iterable[bytes]) -> None:
        """Records that a running sequence uses these blocks, whether there are copies of them or not."""
        for content in contents:
            self._holders[content] += 1
            self._idle.pop(content, None)

    def release(self, contents: Iterable[bytes]) -> None:
        """Ends a `hold`. The last content is evicted last."""
        for content in contents:
            self._holders[content] -= 1
            if not self._holders[content]:
                del self._holders[content]
                copy = self._copies.get(content)
                if copy is not None:
                    self._settle(copy)

    def drop(self, content: bytes) -> None:
        """Removes the copy with this content from the index, if there is one."""
        copy = self._copies.pop(content, None)
        if copy is None:
            return
        was_shareable = copy.is_shareable
        copy.is_dropped = True
        self._idle.pop(content, None)
        if was_shareable:
            if self.saved_index is not None:
                self.saved_index.drop(copy.slot)
            self.on_unshareable(content)
        self._settle(copy)

    def drop_all(self) -> None:
        for content in list(self._copies):
            self.drop(content)

    def _note_shareable(self, copy: HostCopy) -> None:
        if copy.is_shareable:
            if self.saved_index is not None:
                self.saved_index.keep(copy.slot, copy.content)
            self.on_shareable(copy.content)

    def _settle(self, copy: HostCopy) -> None:
        """Frees the slot of a dropped copy, or makes a copy idle, if nothing uses it any more."""
        if copy.is_storing or copy.num_loads:
            if self._copies.get(copy.content) is copy:  # else the copy is dropped, and there may be a newer one
                self._idle.pop(copy.content, None)
        elif copy.is_dropped:
            self._free.append(copy.slot)
        elif copy.content not in self._holders:
            self._idle[copy.content] = None

    def check_integrity(self, stores: Iterable[HostCopy], loads: Counter[HostCopy], used: Counter[bytes]) -> None:
        """Raises AssertionError if the index contradicts itself.

        `stores`: the copies that plans in flight store. `loads`: the copies that plans load or will load, with the
        number of these plans. `used`: content -> number of its holders.
        """
        copies = {*self._copies.values(), *stores, *loads}
        assert {copy for copy in copies if copy.is_storing} == set(stores), (
            "a copy is storing, and no plan in flight stores it"
        )
        assert {copy: copy.num_loads for copy in copies if copy.num_loads} == loads, (
            "a copy has other loads than the plans"
        )
        dropped = {copy.slot for copy in copies if copy.is_dropped}
        taken = [copy.slot for copy in self._copies.values()]
        assert sorted([*taken, *self._free, *dropped]) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert all(content == copy.content for content, copy in self._copies.items())
        assert not any(copy.is_dropped for copy in self._copies.values())
        expected = {
            content
            for content, copy in self._copies.items()
            if not copy.is_storing and not copy.num_loads and content not in self._holders
        }
        assert set(self._idle) == expected, "an idle copy cannot be evicted, or a busy one can"
        assert self._holders == used, "running sequences use other blocks"
