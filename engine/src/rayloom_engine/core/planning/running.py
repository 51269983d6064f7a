"""The running sequences: their slots on the ranks and their KV blocks."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import chain

from rayloom_engine.core.adapter_slots import AdapterSlots
from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.host_tier import NO_HOST_ORDERS, HostOrders, HostTier
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState, order_of
from rayloom_engine.core.window import first_seen_block


class RunningSequences:
    """All running sequences. Each has a slot, and blocks for all of its computed tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pool = BlockPool(config.num_blocks, num_kept=config.num_kept_blocks)
        self.tier: HostTier | None = None  # copies of blocks in host memory; None: there are none
        if config.num_host_slots:
            self.tier = self.pool.tier = HostTier(config.num_host_slots, config.block_size)
            self.tier.slots.on_shareable = lambda content: self.pool.note_copy_added(content)
            self.tier.slots.on_unshareable = lambda content: self.pool.note_copy_dropped(content)
            self.tier.block_of = lambda content: self.pool.block_of(content)
        self.adapters = AdapterSlots(config.max_loras)
        self._config = config
        self._sequences: list[Sequence] = []  # sorted by `Sequence.order`
        self._num_of_tenant: Counter[str] = Counter()  # tenant -> number of its running sequences; never 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._slots_to_free: list[int] = []  # sent to the ranks with the next plan
        self._has_waiting = False  # True if a sequence waits for its grammar

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields the sequences, sorted by `Sequence.order`."""
        return iter(self._sequences)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_of_tenants(self) -> Counter[str]:
        """Returns tenant -> number of its running sequences at the time of the call. Tenants with none are left out."""
        return self._num_of_tenant.copy()

    def in_ranks(self) -> list[tuple[int, Sequence]]:
        """Returns (rank, sequence) of all running sequences, lowest rank first, then by arrival.

        The rank of a sequence is the number of running sequences of the same tenant that come before it in
        `Sequence.order`. (Not the rank of a worker.) With one tenant, the result is sorted by `Sequence.order`.
        """
        if len(self._num_of_tenant) == 1:
            return list(enumerate(self._sequences))
        num_of_tenant: dict[str, int] = {}
        ranked = []
        for sequence in self._sequences:
            rank = num_of_tenant.get(sequence.tenant, 0)
            num_of_tenant[sequence.tenant] = rank + 1
            ranked.append((rank, sequence))
        ranked.sort(key=lambda item: (item[0], item[1].arrival, item[1].number))
        return ranked

    def admit(self, sequence: Sequence) -> None:
        """Gives a free slot to the sequence. Its blocks must be allocated, and a slot must be free for its adapter."""
        sequence.state = SequenceState.RUNNING
        sequence.adapter_slot = self.adapters.use(sequence.params.adapter, sequence.tenant)
        sequence.slot = self._free_slots.pop()
        sequence.num_overtakers = 0
        sequence.num_overtaking_tokens = 0
        insort(self._sequences, sequence, key=order_of)
        self._num_of_tenant[sequence.tenant] += 1

    def leave(self, sequence: Sequence) -> None:
        """Removes the sequence and releases its slot and blocks. Full blocks stay in the prefix index."""
        assert sequence.slot is not None
        self._sequences.remove(sequence)
        self._num_of_tenant[sequence.tenant] -= 1
        if not self._num_of_tenant[sequence.tenant]:
            del self._num_of_tenant[sequence.tenant]
        self._free_slots.append(sequence.slot)
        if sequence.num_sent_blocks:
            self._slots_to_free.append(sequence.slot)
        self._release_blocks(sequence)
        self.adapters.leave(sequence.params.adapter, sequence.tenant)
        sequence.slot = None
        # `own_blocks` includes blocks that the sliding window has released. When the sequence runs again, it does not
        # need these blocks, or finds them in the prefix index.
        sequence.own_blocks = frozenset(sequence.block_ids[: sequence.num_registered_blocks])
        sequence.forget_blocks()

    def forget_all(self, unproven: set[int]) -> list[Sequence]:
        """Empties every slot and the pool, because the ranks have lost their slots and blocks.

        Returns the sequences that were running.

        `unproven`: blocks that plans in flight should have cleared. A rank that survives keeps its memory, so these
        blocks may still hold a NaN.
        """
        left = self._sequences
        for sequence in left:
            self._release_blocks(sequence)
            sequence.slot = None
            sequence.own_blocks = frozenset()
            sequence.forget_blocks()
        self.adapters.forget_all()
        self._sequences = []
        self._num_of_tenant = Counter()
        self._free_slots = list(range(self._config.max_num_seqs - 1, -1, -1))
        self._slots_to_free = []
        self.pool = self.pool.successor(unproven)
        if self.tier is not None:
            self.tier.lose_ranks()
        return left

    def finished(self, sequence: Sequence) -> None:
        """Records that the sequence has ended, whether it was running or not."""
        if self.tier is not None:
            self.tier.drop_unproven(sequence.number)

    def take_host_orders(self, step_id: int, num_tokens: Iterable[int]) -> HostOrders:
        """Returns the stores and loads of the next plan. `num_tokens`: of each sequence in it."""
        if self.tier is None:
            return NO_HOST_ORDERS
        return self.tier.take(step_id, sum(num_tokens))

    def confirm_plan(self, step_id: int) -> None:
        """Records that all ranks have executed a plan."""
        if self.tier is not None:
            self.tier.confirm(step_id)

    def take_freed_slots(self) -> tuple[int, ...]:
        """Returns the slots freed since the last call. The next plan tells the ranks to empty them."""
        freed = tuple(self._slots_to_free)
        self._slots_to_free = []
        return freed

    def wait_for_forms(self, slots: Collection[int]) -> None:
        """Records the slots whose grammars are not built yet. No other slot waits for a grammar."""
        if not slots and not self._has_waiting:
            return
        for sequence in self._sequences:
            # The slot may belong to another sequence by now. If that sequence has no mask, it waits for no grammar.
            sequence.waits_for_form = sequence.slot in slots and sequence.params.has_mask
        self._has_waiting = bool(slots)

    def waiting_for_forms(self) -> list[Sequence]:
        """Returns the sequences that wait for their grammars."""
        return [sequence for sequence in self._sequences if sequence.waits_for_form] if self._has_waiting else []

    def try_extend(self, sequence: Sequence, num_tokens: int, num_kept: int = 0) -> bool:
        """Allocates blocks for the first `num_tokens` tokens. Returns False and changes nothing if blocks run out.

        `num_kept`: number of free blocks that the sequence may not take.
        """
        num = -(-num_tokens // self._config.block_size) - len(sequence.block_ids)
        if num > max(0, self.pool.num_free - num_kept):
            return False
        if num > 0:
            sequence.block_ids.extend(self.pool.allocate(num))
        return True

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many blocks the sequence does not hold yet of those that its known tokens need."""
        num_held = len(sequence.block_ids) - sequence.first_block
        return max(0, self._config.most_blocks(sequence.num_tokens) - num_held)

    def planned(self, sequences: Iterable[Sequence]) -> None:
        """Records that tokens of these sequences are computed. Tokens of plans in flight count as computed.

        A sequence changes only if the plan fills one of its blocks, or moves its sliding window past a block.
        """
        block_size = self._config.block_size
        if self._config.enable_prefix_caching:
            for sequence in sequences:
                if min(sequence.num_computed, sequence.num_tokens) // block_size > sequence.num_registered_blocks:
                    self._register_full_blocks(sequence)
        if self._config.window is not None:
            for sequence in sequences:
                self._give_back_unseen_blocks(sequence)

    def learned(self, sequence: Sequence) -> None:
        """Records that the id of a placeholder is known now, which may complete a block or move the sliding window."""
        self.planned((sequence,))

    def _register_full_blocks(self, sequence: Sequence) -> None:
        """Adds the blocks that have become full to the prefix index.

        Ranks compute plans in order, so the next step may already reuse a block that this step fills.
        """
        first = sequence.num_registered_blocks
        num_full = min(sequence.num_computed, sequence.num_tokens) // self._config.block_size
        hashes = sequence.hashes(num_full, self._config.block_size, first)
        for block_id, content in zip(sequence.block_ids[first:num_full], hashes, strict=True):
            self.pool.register(block_id, content)
        sequence.num_registered_blocks = num_full
        if self.tier is not None:
            blocks = list(zip(sequence.block_ids[first:num_full], hashes, strict=True))
            self.tier.use(sequence.number, blocks, first - sequence.first_block)

    def share(self, sequence: Sequence, first: int, block_ids: Iterable[int | None]) -> int:
        """Gives computed blocks to a sequence without blocks. Returns how many of them the next plan must load.

        `block_ids`: the sequence's blocks from index `first` on. For None, a block is allocated, and its content is
        loaded from host memory. `try_extend` must have room for these blocks.
        """
        wanted = list(block_ids)
        self.pool.hold(block_id for block_id in wanted if block_id is not None)
        num_loads = wanted.count(None)
        loaded = iter(self.pool.allocate(num_loads))
        sequence.block_ids = [0] * first  # entries before `first` are never read
        sequence.first_block = first
        # The shared blocks are in the prefix index, or enter it below.
        sequence.num_registered_blocks = first + len(wanted)
        hashes: list[bytes] = []
        to_load: set[bytes] = set()
        if self.tier is not None:
            hashes = sequence.hashes(sequence.num_registered_blocks, self._config.block_size)
        for block_id in wanted:
            if block_id is None:
                assert self.tier is not None
                content = hashes[len(sequence.block_ids)]
                block_id = next(loaded)
                # Before `register`, which drops a copy that nobody has proven if it replaces a block of this content.
                self.tier.load(content, block_id)
                to_load.add(content)
                self.pool.register(block_id, content)
            sequence.block_ids.append(block_id)
        if self.tier is not None:
            self.tier.drop_unproven(sequence.number, to_load)
            self.tier.use(sequence.number, list(zip(sequence.block_ids[first:], hashes[first:], strict=True)))
        return num_loads

    def num_sole(self, sequence: Sequence, kept: set[int]) -> int:
        """Returns how many blocks become free if this sequence releases all of its blocks except those in `kept`."""
        return sum(1 for b in sequence.held_block_ids if b not in kept and self.pool.ref_count(b) == 1)

    def _give_back_unseen_blocks(self, sequence: Sequence) -> None:
        """Releases the blocks before the sequence's sliding window. No later token attends to these blocks.

        Plans in flight may still read these blocks. That is safe, because a plan that writes to the blocks for a new
        owner runs later.
        """
        # If the sequence has a mask, the newest token does not count, because it is computed again if the mask is not
        # ready. Placeholders do not count either: their block is kept until it is in the prefix index.
        num_computed = min(sequence.num_computed, sequence.num_tokens) - sequence.params.has_mask
        first = first_seen_block(num_computed, self._config.window, self._config.block_size)
        if first > sequence.first_block:
            num_proven = sequence.num_proven_blocks(self._config.block_size) - sequence.first_block
            self.pool.release(sequence.block_ids[sequence.first_block : first], max(0, num_proven))
            if self.tier is not None:
                self.tier.leave(sequence.number, _used_hashes(sequence)[: first - sequence.first_block])
            sequence.first_block = first

    def prove(self, sequence: Sequence) -> None:
        """Records that finite logits were computed from all known tokens of the sequence.

        With a sliding window, also lets other sequences reuse the blocks that the window has released. Without these
        blocks, a long prompt would have no cached prefix. The released blocks are most likely finite, too. A NaN in
        these blocks would have spread from layer to layer to the newest positions, far beyond the window of one layer.
        """
        if sequence.first_block:
            num = min(sequence.first_block, sequence.num_registered_blocks)
            if sequence.num_proven < num * self._config.block_size:
                self.pool.vouch(sequence.block_ids[:num], sequence.hashes(num, self._config.block_size))
        sequence.num_proven = sequence.num_tokens
        if self.tier is not None:
            self.tier.prove(sequence.number)

    def _release_blocks(self, sequence: Sequence) -> None:
        num_proven = sequence.num_proven_blocks(self._config.block_size) - sequence.first_block
        self.pool.release(sequence.held_block_ids, max(0, num_proven))
        if self.tier is not None:
            self.tier.leave(sequence.number, _used_hashes(sequence))

    def check_integrity(self) -> None:
        """Raises AssertionError if slots and blocks contradict each other."""
        assert self._sequences == sorted(self._sequences, key=order_of)
        assert self._num_of_tenant == Counter(s.tenant for s in self._sequences)
        assert all(s.state is SequenceState.RUNNING for s in self._sequences)
        slots = [s.slot for s in self._sequences if s.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self._config.max_num_seqs))
        for sequence in self._sequences:
            num_positions = len(sequence.block_ids) * self._config.block_size
            most = min(num_positions, sequence.num_tokens + self._config.num_ahead)
            assert sequence.num_computed <= most, f"{sequence.request_id}: no block"
            assert sequence.first_block <= first_seen_block(
                sequence.num_computed, self._config.window, self._config.block_size
            ), f"{sequence.request_id}: a block that is still seen was given back"
        self.adapters.check_integrity((s.tenant, s.params.adapter) for s in self._sequences)
        self.pool.check_integrity(s.held_block_ids for s in self._sequences)
        if self.tier is not None:
            self.tier.check_integrity(Counter(chain.from_iterable(map(_used_hashes, self._sequences))))


def _used_hashes(sequence: Sequence) -> SequenceOf[bytes]:
    """Returns the hashes of the blocks in the prefix index that the sequence holds, in order of position."""
    return sequence.known_hashes[sequence.first_block : sequence.num_registered_blocks]
