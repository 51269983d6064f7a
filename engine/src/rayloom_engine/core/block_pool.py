"""BlockPool: reference counts of the KV blocks, the index of reusable prefixes, and the order of eviction.

A block is in exactly one of these states:

  held      ref_count > 0: the number of sequences that have the block in their block tables
  cached    ref_count = 0, with a hash: the content is part of a known prefix; a prefix hit makes the block held
            again, unless the block was evicted before
  free      ref_count = 0, without a hash; free blocks are allocated before cached blocks
  untouched free, and never allocated: the block has no physical memory yet

The content of a block is proven once finite logits were computed from it. It stays proven, because a full block is
never written again. An unproven block that no sequence holds may contain a NaN, so two rules apply:
- The prefix index returns such a block only to the sequence that filled it.
- If such a block is allocated for other content, it is cleared first. Positions that the new owner has not written yet
  are multiplied by zero in masked attention, and NaN x 0 is NaN.

Cached blocks are evicted least-recently-used first. A sequence releases its last block first, so the end of a prefix is
evicted before its beginning. In the other order, the rest of a prefix would be useless: without the first block, the
later blocks cannot be found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from rayloom_engine.core.cache_growth import CacheGrowth
from rayloom_engine.core.cache_log import CacheLog
from rayloom_engine.core.host_tier import HostTier


class BlockPool:
    """`num_blocks` blocks with reference counts, a prefix index and LRU eviction."""

    def __init__(self, num_blocks: int, unproven: Iterable[int] = (), num_kept: int | None = None) -> None:
        """`unproven`: blocks that may hold a NaN from the time before this pool.

        `num_kept`: limit of cached blocks at the beginning, see cache_growth.py.
        """
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.log: CacheLog | None = None  # records changes of the prefix index; None: changes are not recorded
        self.tier: HostTier | None = None  # copies of blocks in host memory; None: there are none
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # block id -> hash of its content, if reusable
        self._cached: dict[bytes, int] = {}  # hash -> block id
        self._unproven = set(unproven)  # blocks that may hold a NaN: not proven since their last allocation
        self._vouched: set[int] = set()  # blocks that are unproven, but that every sequence may reuse (`vouch`)
        self._to_clear: list[int] = []  # allocated blocks that the next plan must clear
        self._free_plain: list[int] = []  # free blocks that were in use; the block that was freed last is at the end
        self._first_untouched = 0  # this block and all later ones are untouched
        # cached blocks; the block that was freed first is evicted first
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._growth = CacheGrowth(num_blocks, num_kept)

    def successor(self, unproven: Iterable[int] = ()) -> BlockPool:
        """Returns a pool in which all blocks are free, because the ranks have lost the blocks' content.

        The new pool begins with the present cache limit of this pool. `unproven`: further blocks that may hold a NaN,
        besides the unproven blocks of this pool.
        """
        successor = BlockPool(self.num_blocks, self.unproven().union(unproven), self._growth.limit)
        successor.log = self.log
        successor.tier = self.tier
        for content in self._cached:
            self._note_removed(content)
        return successor

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free and cached blocks."""
        return len(self._free_plain) + self.num_untouched + len(self._free_cached)

    @property
    def num_untouched(self) -> int:
        """Number of blocks that were never allocated."""
        return self.num_blocks - self._first_untouched

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num: int) -> list[int]:
        """Returns `num` blocks with ref_count 1 and no hash. The caller must have checked `num_free`."""
        assert num <= self.num_free, f"asked for {num} blocks, {self.num_free} free"
        block_ids = []
        for _ in range(num):
            block_id = self._take()
            self._ref_counts[block_id] = 1
            if block_id in self._unproven:
                self._to_clear.append(block_id)
            self._unproven.add(block_id)
            self._vouched.discard(block_id)
            block_ids.append(block_id)
        return block_ids

    def _take(self) -> int:
        """Chooses the best free block to allocate, removes it from the free blocks and returns it."""
        if self._free_plain:
            # the block that was freed last, because its memory may still be in the processor's caches
            return self._free_plain.pop()
        is_full = self._growth.is_full(len(self._free_cached))
        if self.num_untouched and not is_full:
            self._first_untouched += 1
            return self._first_untouched - 1
        block_id, _ = self._free_cached.popitem(last=False)
        evicted = self._hashes[block_id]
        assert evicted is not None
        if self.num_untouched:
            self._growth.note_evicted(evicted)
        del self._cached[evicted]
        self._hashes[block_id] = None
        self._note_removed(evicted)
        if self.tier is not None:
            self.tier.evicted(evicted, block_id)
        return block_id

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each block. The blocks must be held or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], num_proven: int | None = None) -> None:
        """Removes a holder from each block of a sequence. `block_ids`: in order of position.

        Finite logits were computed from the first `num_proven` blocks (None = all). The state of the other blocks does
        not change: another holder may have proven them.
        """
        for index, block_id in reversed(list(enumerate(block_ids))):
            assert self._ref_counts[block_id] > 0, f"block {block_id} released more often than held"
            self._ref_counts[block_id] -= 1
            if num_proven is None or index < num_proven:
                self._unproven.discard(block_id)
            if self._ref_counts[block_id] == 0:
                if self._hashes[block_id] is not None:
                    self._free_cached[block_id] = None
                else:
                    self._free_plain.append(block_id)

    def register(self, block_id: int, content: bytes) -> None:
        """Adds a held, full block to the prefix index. `content`: the hash of its content.

        If the index already has another block with this content, the other block stays and `block_id` is not added.
        But if the other block is doubtful (see `_is_doubtful`), `block_id` replaces it.
        """
        assert self._ref_counts[block_id] > 0
        other = self._cached.get(content)
        if other is not None and self._is_doubtful(other):
            self._unlink(content)
            other = None
        if self._hashes[block_id] is None and other is None:
            self._hashes[block_id] = content
            self._cached[content] = block_id
            if self.log is not None and not self._has_copy(content):
                self.log.added(content)

    def vouch(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Lets every sequence reuse these released blocks, because finite logits were computed at later positions.

        Blocks that hold other content by now are skipped. Vouched blocks stay unproven, so they are cleared after their
        next allocation.
        """
        for block_id, content in zip(block_ids, hashes, strict=True):
            if self._hashes[block_id] == content:
                self._vouched.add(block_id)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Removes blocks from the prefix index, whether held or not, because their keys and values may be wrong.

        Drops their copies in host memory, too.
        """
        hashes = list(hashes)
        for content in hashes:
            self._unlink(content)
        if self.tier is not None:
            self.tier.forget(hashes)

    def _unlink(self, content: bytes) -> None:
        """Removes the block with this content from the prefix index, if there is one."""
        block_id = self._cached.pop(content, None)
        if block_id is None:
            return
        self._note_removed(content)
        if self.tier is not None:
            self.tier.unlinked(content)
        self._hashes[block_id] = None
        if self._ref_counts[block_id] == 0:
            del self._free_cached[block_id]
            self._free_plain.append(block_id)
            self._unproven.add(block_id)

    def note_copy_added(self, content: bytes) -> None:
        """Records that there is now a copy in host memory that every sequence may load."""
        if self.log is not None and content not in self._cached:
            self.log.added(content)

    def note_copy_dropped(self, content: bytes) -> None:
        """Records that such a copy is gone."""
        if self.log is not None and content not in self._cached:
            self.log.removed(content)

    def _has_copy(self, content: bytes) -> bool:
        return self.tier is not None and self.tier.slots.is_shareable(content)

    def _note_removed(self, content: bytes) -> None:
        """Records that the prefix index has lost a block. Routers need not know if there is a copy in host memory."""
        if self.log is not None and not self._has_copy(content):
            self.log.removed(content)

    def take_unclear(self) -> tuple[int, ...]:
        """Returns the blocks that the next plan must clear: allocated since the last call, and possibly with a NaN."""
        taken = tuple(self._to_clear)
        self._to_clear = []
        return taken

    def unproven(self) -> set[int]:
        """All blocks, held or not, that may hold a NaN."""
        return self._unproven | set(self._to_clear)

    def known(self, hashes: Iterable[bytes], own: Collection[int] = ()) -> list[int | None]:
        """Returns for each content hash the block with that content; None if there is no such block to reuse.

        `own`: blocks that the sequence has filled itself. These blocks are returned even if they are unproven and no
        sequence holds them. The caller must call `hold` for the blocks that it uses.
        """
        found: list[int | None] = []
        has_missed = False
        for content in hashes:
            block_id = self._cached.get(content)
            if block_id is None and not has_missed:
                has_missed = True
                self._growth.note_miss(content)
            is_offered = block_id is None or block_id in own or not self._is_doubtful(block_id)
            found.append(block_id if is_offered else None)
        return found

    def block_of(self, content: bytes) -> int | None:
        """Returns the block of the prefix index with this content."""
        return self._cached.get(content)

    def cached_hashes(self) -> list[bytes]:
        """Returns the content hashes of the prefix index, and of the copies in host memory that are shareable."""
        if self.tier is None:
            return list(self._cached)
        return [*self._cached, *(each for each in self.tier.slots.shareable_contents() if each not in self._cached)]

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """Returns an estimate of the number of leading blocks that the prefix index or host memory has.

        `hashes`: hashes of a sequence's full blocks, in order. The end of a prefix is evicted before its beginning, so
        a binary search finds the length. The result may be wrong if a block in the middle is missing.
        """
        return bisect_left(hashes, True, key=self._is_missing)

    def _is_missing(self, content: bytes) -> bool:
        return content not in self._cached and not self._has_copy(content)

    def _is_doubtful(self, block_id: int) -> bool:
        """True if no sequence holds the block, the block is unproven, and `vouch` was not called for it."""
        return self._ref_counts[block_id] == 0 and block_id in self._unproven and block_id not in self._vouched

    def num_cached_only(self, block_ids: Iterable[int]) -> int:
        """Number of these blocks that are cached but not held. `hold` would lower `num_free` by this number."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if counts and lists contradict each other, or contradict the block tables."""
        expected = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block table names a block twice: {list(table)}"
            for block_id in table:
                expected[block_id] += 1
        assert expected == self._ref_counts, f"tables hold {expected}, counts say {self._ref_counts}"
        untouched = set(range(self._first_untouched, self.num_blocks))
        free = set(self._free_plain) | untouched | set(self._free_cached)
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count}
        assert not free & held, f"both free and held: {sorted(free & held)}"
        assert len(free) + len(held) == self.num_blocks, f"{len(free)} free + {len(held)} held != {self.num_blocks}"
        assert self.num_free == len(free), "a block is in two free lists"
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._cached, "index and blocks differ"
        assert all(self._hashes[block_id] is None for block_id in (*self._free_plain, *untouched))
        assert all(self._hashes[block_id] is not None for block_id in self._free_cached)
