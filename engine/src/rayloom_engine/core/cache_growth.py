"""CacheGrowth: decides whether a new block comes from untouched memory or from the oldest block of the prefix cache.

On a CPU the operating system allocates a block's memory at the first write. Without a limit, a prefix cache that no
prompt ever hits would grow to the size of the whole pool. So the number of cached blocks has a limit. The limit doubles
each time a prompt misses a block that was evicted because of the limit. So the cache grows as far as prompts use it.
"""

from __future__ import annotations

from collections import OrderedDict


class CacheGrowth:
    """The limit of cached blocks, and the hashes of the last `num_blocks` blocks that were evicted because of it."""

    def __init__(self, num_blocks: int, num_kept: int | None) -> None:
        """`num_blocks`: the blocks of the pool. `num_kept`: the limit at the beginning; None: no limit."""
        self._num_blocks = num_blocks
        self.limit = num_blocks if num_kept is None else min(num_blocks, num_kept)
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # hashes of the evicted blocks, oldest first

    def is_full(self, num_cached: int) -> bool:
        """Returns whether a new block must be one of the `num_cached` cached blocks, even if untouched blocks are left.

        False if the limit is the size of the pool.
        """
        return self.limit < self._num_blocks and num_cached >= self.limit

    def note_evicted(self, content: bytes) -> None:
        """Records that a block was evicted because of the limit."""
        self._evicted[content] = None
        if len(self._evicted) > self._num_blocks:
            self._evicted.popitem(last=False)

    def note_miss(self, content: bytes) -> None:
        """Records the first block that a prompt misses. Doubles the limit if the limit caused the block's eviction.

        An eviction doubles the limit at most once.
        """
        if content in self._evicted:
            del self._evicted[content]
            self.limit = min(self._num_blocks, 2 * self.limit)
            if self.limit == self._num_blocks:
                self._evicted.clear()
