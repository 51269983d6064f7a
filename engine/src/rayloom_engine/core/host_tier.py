"""HostTier: decides which KV blocks the ranks copy to host memory, and which copies they load again.

A block is copied soon after its hash enters the prefix index, and not only when it is evicted. So an eviction copies
nothing, and the loss of a rank loses few blocks: the ranks' device memory is gone, but their host memory stays.

A rank executes the orders of a plan in this order: it stores blocks, clears blocks, loads blocks, computes.
- A store reads what earlier plans have computed, and the plan's own new owner of the block writes later.
- All ranks take part in the computation. So the result of a plan proves that every rank has executed the plan's stores,
  and only then a copy may be loaded. If a rank dies within a plan, its half-written slots are in no index.

The number of stores in a plan grows with its number of tokens, because a store must not delay the decodes of a short
step. The blocks of a long prompt are thus stored with its next chunks, and the last of them over the next decodes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rayloom_engine.core.host_slots import HostCopy, HostSlots, SavedIndex

_LEAST_STORES = 4  # blocks that a plan may store, besides one for each `block_size` tokens that it computes


@dataclass(frozen=True, slots=True)
class HostOrders:
    """The blocks that a plan stores, as (block, host slot), and those that it loads, as (host slot, block)."""

    stores: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()


NO_HOST_ORDERS = HostOrders()


@dataclass(slots=True)
class _Evicted:
    """A block that was evicted before it was stored. Its content stays until the next plan's stores have run."""

    content: bytes
    block_id: int
    prover: int | None  # as in HostCopy


@dataclass(slots=True)
class _InFlight:
    """The copies that a plan in flight stores and loads."""

    stores: list[HostCopy] = field(default_factory=list)
    loads: list[HostCopy] = field(default_factory=list)


class HostTier:
    """The scheduler's view of the host memory of all ranks.

    `content`, here and in HostSlots: the hash of a block's content.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.slots = HostSlots(num_slots)
        self.num_stored = 0  # blocks stored since the start of this process
        self.num_loaded = 0  # blocks loaded since the start of this process
        # returns the block of the prefix index with a content; None if there is none
        self.block_of: Callable[[bytes], int | None] = lambda _: None
        self._block_size = block_size
        # ids of the ranks' memory; None: `begin_epoch` was never called, as for an engine in one process
        self.memory: tuple[str, ...] | None = None
        self._to_store: OrderedDict[bytes, int | None] = OrderedDict()  # content -> prover, oldest first
        self._evicted: list[_Evicted] = []
        self._to_load: dict[int, HostCopy] = {}  # block -> the copy that the next plan loads into it
        self._in_flight: dict[int, _InFlight] = {}  # step id -> the copies of this plan
        self._unproven: dict[int, list[bytes]] = {}  # number of a sequence -> contents that it has yet to prove
        # number of a sequence -> its blocks, by content, whose copies another sequence has yet to prove
        self._unproven_by_others: dict[int, dict[bytes, int]] = {}
        self._num_verdicts = 0  # how often copies of a sequence were proven, or dropped because they never will be
        self._verdicts_at: dict[int, int] = {}  # number of a sequence -> `_num_verdicts` when its blocks were checked

    def begin_epoch(self, memory: tuple[str, ...], saved_index: SavedIndex | None = None) -> None:
        """Keeps the copies if all ranks have the memory of the epoch before, else drops them.

        `memory`: an id of each rank's memory. A rank that lost its memory has a new id; "" if it has none, and then
        there are no copies in this epoch. `saved_index`: the record of the copies in this memory.
        """
        assert not self._in_flight
        if memory == self.memory:
            return
        self.slots.drop_all()
        self.memory = memory
        self.slots.saved_index = saved_index
        if saved_index is not None and self.is_usable:
            self.slots.restore(saved_index.entries())

    @property
    def is_usable(self) -> bool:
        """True if every rank has host memory."""
        return self.memory is None or all(self.memory)

    def use(self, number: int, blocks: Sequence[tuple[int, bytes]], first: int = 0) -> None:
        """Records that a running sequence uses (block, content), and queues its blocks without a copy.

        `number`: the sequence. Its blocks are full after the plans made so far. If the prefix index has another block
        with this content, the sequence's own block is not queued: its logits would prove nothing about the copy.
        `first`: how many blocks the sequence uses already. If all of them are more than the host memory has room for,
        the last ones are not queued.
        """
        self.slots.hold(content for _, content in blocks)
        if not self.is_usable:
            return
        for block_id, content in blocks[: max(0, self.slots.num_slots - first)]:
            if self._is_missing(content):
                if self.block_of(content) == block_id:
                    self._to_store[content] = number
                    self._unproven.setdefault(number, []).append(content)
            elif self._prover(content) not in (None, number):
                self._unproven_by_others.setdefault(number, {})[content] = block_id

    def leave(self, number: int, contents: Sequence[bytes]) -> None:
        """Ends `use` for blocks of a sequence, which are in order of position."""
        self.slots.release(reversed(contents))
        if number in self._unproven_by_others:
            self._drop_unproven_by_others(number, contents)

    def _is_missing(self, content: bytes) -> bool:
        """True if there is no copy, and no order to store one."""
        return self.slots.find(content) is None and content not in self._to_store

    def _prover(self, content: bytes) -> int | None:
        """Returns the prover of a copy, or of the order to store it."""
        copy = self.slots.find(content)
        return self._to_store.get(content) if copy is None else copy.prover

    def _drop_unproven_by_others(self, number: int, contents: Iterable[bytes]) -> None:
        blocks = self._unproven_by_others[number]
        for content in contents:
            blocks.pop(content, None)
        if not blocks:
            del self._unproven_by_others[number]
            self._verdicts_at.pop(number, None)

    def prove(self, number: int) -> None:
        """Records that finite logits were computed from all blocks of the sequence.

        The sequence has computed or loaded the blocks of all its unproven copies since its admission (`drop_unproven`).
        """
        unproven = self._unproven.pop(number, ())
        self._num_verdicts += bool(unproven)
        for content in unproven:
            copy = self.slots.find(content)
            if copy is not None and copy.prover == number:
                self.slots.prove(copy)
            elif self._to_store.get(content) == number:
                self._to_store[content] = None
        # Each token of the sequence proves its blocks again. They are checked only if this can change something.
        if number in self._unproven_by_others and self._verdicts_at.get(number) != self._num_verdicts:
            self._verdicts_at[number] = self._num_verdicts
            self._prove_for_others(number)
        for each in self._evicted:
            if each.prover == number:
                each.prover = None

    def _prove_for_others(self, number: int) -> None:
        """Queues blocks of the sequence whose copies were dropped when another sequence ended."""
        settled = []
        for content, block_id in self._unproven_by_others[number].items():
            if self._prover(content) is not None:
                continue
            if self._is_missing(content) and self.block_of(content) == block_id:
                self._to_store[content] = None
            settled.append(content)
        self._drop_unproven_by_others(number, settled)

    def drop_unproven(self, number: int, to_load: Collection[bytes] = ()) -> None:
        """Drops what the sequence has not proven, except copies that it loads.

        No sequence may load these copies any more: this sequence has ended, or it is admitted again and gets its logits
        from other blocks of the same content. These logits would prove nothing about the copies.
        """
        unproven = self._unproven.pop(number, [])
        self._num_verdicts += bool(unproven)
        if kept := [each for each in unproven if each in to_load]:
            self._unproven[number] = kept
        for content in unproven:
            if content in to_load:
                continue
            copy = self.slots.find(content)
            if copy is not None and copy.prover == number:
                self.slots.drop(content)
            elif self._to_store.get(content) == number:
                del self._to_store[content]
        self._evicted = [each for each in self._evicted if each.prover != number]

    def forget(self, contents: Iterable[bytes]) -> None:
        """Drops copies because the blocks' keys and values may be wrong."""
        gone = set(contents)
        for content in gone:
            self._to_store.pop(content, None)
            self.slots.drop(content)
        for number in list(self._unproven_by_others):
            self._drop_unproven_by_others(number, gone)
        self._evicted = [each for each in self._evicted if each.content not in gone]

    def unlinked(self, content: bytes) -> None:
        """Records that a block left the prefix index without an eviction. Drops its copy unless the copy is proven."""
        self._num_verdicts += 1
        self._to_store.pop(content, None)
        copy = self.slots.find(content)
        if copy is not None and copy.prover is not None:
            self.slots.drop(content)

    def evicted(self, content: bytes, block_id: int) -> None:
        """Records that a block left the prefix index to get another content. The next plan can still store it."""
        is_to_load = block_id in self._to_load  # only ordered, so the block does not have this content
        self._cancel_load(block_id)
        if content in self._to_store:
            prover = self._to_store.pop(content)
            if not is_to_load:
                self._evicted.append(_Evicted(content, block_id, prover))

    def load(self, content: bytes, block_id: int) -> None:
        """Orders the next plan to load a copy into a block. `slots.may_load` must have been True."""
        copy = self.slots.find(content)
        assert copy is not None
        self._cancel_load(block_id)
        self._to_load[block_id] = copy
        self.slots.begin_load(copy)

    def take(self, step_id: int, num_tokens: int) -> HostOrders:
        """Returns the orders for the next plan, which computes `num_tokens` tokens."""
        if not (self._to_load or self._to_store or self._evicted):
            return NO_HOST_ORDERS
        in_flight = _InFlight()
        loads = []
        for block_id, copy in list(self._to_load.items()):
            if self.block_of(copy.content) != block_id:
                self._cancel_load(block_id)  # the block may belong to another sequence by now
                continue
            in_flight.loads.append(copy)
            loads.append((copy.slot, block_id))
        stores = self._stores(in_flight, _LEAST_STORES + num_tokens // self._block_size)
        self._to_load = {}
        self._evicted = []  # this plan overwrites the blocks that it does not store
        if loads or stores:
            self._in_flight[step_id] = in_flight
        self.num_loaded += len(loads)
        return HostOrders(tuple(stores), tuple(loads))

    def _stores(self, in_flight: _InFlight, most: int) -> list[tuple[int, int]]:
        """Returns at most `most` stores, and adds their copies to `in_flight`."""
        stores: list[tuple[int, int]] = []
        for each in self._evicted:
            if len(stores) < most and self.slots.find(each.content) is None:
                self._store(stores, in_flight, each.content, each.block_id, each.prover)
        done = []
        for content, prover in self._to_store.items():
            block_id = self.block_of(content)
            if block_id is not None and block_id in self._to_load:
                continue  # the block gets its content after the stores of this plan
            is_due = block_id is not None and self.slots.find(content) is None
            if is_due and len(stores) >= most:
                break
            if block_id is not None and is_due and not self._store(stores, in_flight, content, block_id, prover):
                break  # no slot is free: running sequences use the copied blocks, or plans in flight use the copies
            done.append(content)
        for content in done:
            del self._to_store[content]
        return stores

    def _store(
        self,
        stores: list[tuple[int, int]],
        in_flight: _InFlight,
        content: bytes,
        block_id: int,
        prover: int | None,
    ) -> bool:
        """Adds a store. Returns False if there is no slot for it."""
        copy = self.slots.try_add(content, prover)
        if copy is None:
            return False
        in_flight.stores.append(copy)
        stores.append((block_id, copy.slot))
        return True

    def confirm(self, step_id: int) -> None:
        """Records that all ranks have executed the orders of a plan."""
        in_flight = self._in_flight.pop(step_id, None)
        if in_flight is None:
            return
        for copy in in_flight.stores:
            self.slots.stored(copy)
        for copy in in_flight.loads:
            self.slots.end_load(copy)
        self.num_stored += len(in_flight.stores)

    def lose_ranks(self) -> None:
        """Drops all orders, and the copies that plans in flight should have stored, because the ranks are gone."""
        for copy in self._to_load.values():
            self.slots.end_load(copy)
        for in_flight in self._in_flight.values():
            for copy in in_flight.stores:
                if not copy.is_dropped:
                    self.slots.drop(copy.content)
                self.slots.stored(copy)  # frees its slot
            for copy in in_flight.loads:
                self.slots.end_load(copy)
        self._to_load = {}
        self._in_flight = {}
        self._to_store.clear()
        self._evicted = []

    def _cancel_load(self, block_id: int) -> None:
        """Drops the order to load into a block, if there is one."""
        copy = self._to_load.pop(block_id, None)
        if copy is not None:
            self.slots.end_load(copy)

    def check_integrity(self, used: Counter[bytes]) -> None:
        """Raises AssertionError if the orders, the slots and the running sequences contradict each other.

        `used`: content -> number of running sequences that use its block.
        """
        loads = Counter(self._to_load.values())
        stores: list[HostCopy] = []
        for in_flight in self._in_flight.values():
            stores += in_flight.stores
            loads.update(in_flight.loads)
        self.slots.check_integrity(stores, loads, used)
