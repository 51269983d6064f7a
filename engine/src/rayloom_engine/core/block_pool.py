"""BlockPool: the KV blocks with their holders, the index of reusable prefixes, and the order of eviction.

A block is in exactly one of these states:

  held      ref_count > 0; in the block table of that many sequences
  cached    ref_count = 0, has a hash: content is a known prefix; in the free list, may be taken back by a hit
  free      ref_count = 0, no hash; in the free list, at its head, so that cached content lives longest

The content of a block is proven once finite logits were computed from it. It stays proven, because a full block is
never written again. A free block with unproven content is a prefix for no sequence but the one that filled it, and it
is cleared before it is allocated for other content: a NaN in the part that its new owner has not written yet would
spread, since masked attention multiplies it by zero.

The free list is least-recently-used first. A sequence releases its blocks last block first, so the tail of a prefix is
evicted before its beginning (a chain without its beginning can never be found).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks with reference counts, a prefix index and LRU eviction."""

    def __init__(self, num_blocks: int, unproven: Iterable[int] = ()) -> None:
        """`unproven`: blocks that may hold a NaN from before."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks  # block id -> hash of its content, if reusable
        self._cached: dict[bytes, int] = {}  # hash -> block id
        self._unproven = set(unproven)  # blocks that may hold a NaN: allocated, and not proven since
        self._vouched: set[int] = set()  # of those: blocks that may be found nevertheless
        self._to_clear: list[int] = []  # allocated, and to be cleared by the next plan
        # Both ordered oldest first; together they are the free list. OrderedDict is a linked list with O(1) removal.
        self._free_plain: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free or only cached."""
        return len(self._free_plain) + len(self._free_cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with ref_count 1 and no hash. The caller has checked `num_free`."""
        assert num <= self.num_free, f"asked for {num} blocks, {self.num_free} free"
        block_ids = []
        for _ in range(num):
            if self._free_plain:
                # The block freed last is taken first: its memory is warm, and untouched memory stays untouched.
                block_id, _ = self._free_plain.popitem(last=False)
            else:
                block_id, _ = self._free_cached.popitem(last=False)
                evicted = self._hashes[block_id]
                assert evicted is not None
                del self._cached[evicted]
                self._hashes[block_id] = None
            self._ref_counts[block_id] = 1
            if block_id in self._unproven:
                self._to_clear.append(block_id)
            self._unproven.add(block_id)
            self._vouched.discard(block_id)
            block_ids.append(block_id)
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each block, which is held or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int], num_proven: int | None = None) -> None:
        """Removes a holder from each block of a sequence, in order of position.

        Finite logits were computed from the first `num_proven` blocks (None = from all). The state of the others stays
        as it is: another holder may have proven them.
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
                    self._free_plain[block_id] = None
                    self._free_plain.move_to_end(block_id, last=False)

    def register(self, block_id: int, content: bytes) -> None:
        """Enters a held block, which is full and holds `content`, into the prefix index.

        A second block with the same content stays unregistered, unless the first one is free and not proven.
        """
        assert self._ref_counts[block_id] > 0
        other = self._cached.get(content)
        if other is not None and self._is_doubtful(other):
            self.forget([content])
            other = None
        if self._hashes[block_id] is None and other is None:
            self._hashes[block_id] = content
            self._cached[content] = block_id

    def vouch(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Opens blocks to every sequence: finite logits followed from them after they were released.

        Blocks that hold other content by now are left out. All are still cleared before they hold other content.
        """
        for block_id, content in zip(block_ids, hashes, strict=True):
            if self._hashes[block_id] == content:
                self._vouched.add(block_id)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Takes blocks out of the prefix index, held or not: their content does not follow from their tokens."""
        for content in hashes:
            block_id = self._cached.pop(content, None)
            if block_id is None:
                continue
            self._hashes[block_id] = None
            if self._ref_counts[block_id] == 0:
                del self._free_cached[block_id]
                self._free_plain[block_id] = None
                self._free_plain.move_to_end(block_id, last=False)
                self._unproven.add(block_id)

    def take_unclear(self) -> tuple[int, ...]:
        """The blocks allocated since the last call whose old content must be cleared before anything is computed."""
        taken = tuple(self._to_clear)
        self._to_clear = []
        return taken

    def unproven(self) -> set[int]:
        """The blocks that may hold a NaN, including blocks that are held."""
        return self._unproven | set(self._to_clear)

    def known(self, hashes: Iterable[bytes], own: Collection[int] = ()) -> list[int | None]:
        """For each content the block with it, or None. The caller holds the blocks afterwards.

        A free block that is not proven is found only by the sequence that filled it: `own` names that sequence's
        blocks.
        """
        found = (self._cached.get(content) for content in hashes)
        return [
            None if block_id is not None and self._is_doubtful(block_id) and block_id not in own else block_id
            for block_id in found
        ]

    def _is_doubtful(self, block_id: int) -> bool:
        """Returns whether the block is free and not proven.

        The owner of such a block finished or was preempted before finite logits.
        """
        return self._ref_counts[block_id] == 0 and block_id in self._unproven and block_id not in self._vouched

    def num_cached_only(self, block_ids: Iterable[int]) -> int:
        """The number of these blocks without a holder: holding them takes from `num_free`."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError when counts and lists contradict each other or the block tables of all sequences."""
        expected = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block table names a block twice: {list(table)}"
            for block_id in table:
                expected[block_id] += 1
        assert expected == self._ref_counts, f"tables hold {expected}, counts say {self._ref_counts}"
        free = set(self._free_plain) | set(self._free_cached)
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count}
        assert not free & held, f"both free and held: {sorted(free & held)}"
        assert len(free) + len(held) == self.num_blocks, f"{len(free)} free + {len(held)} held != {self.num_blocks}"
        assert len(self._free_plain) + len(self._free_cached) == len(free), "a block is in both free lists"
        assert {h: b for b, h in enumerate(self._hashes) if h is not None} == self._cached, "index and blocks differ"
        assert all(self._hashes[block_id] is None for block_id in self._free_plain)
        assert all(self._hashes[block_id] is not None for block_id in self._free_cached)
