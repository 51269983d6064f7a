"""CacheGrowth: decides when the prefix cache may take memory that was never touched, instead of its own oldest blocks.

On a CPU the memory of a block is taken with its first use. A cache of prefixes that nobody asks for again would then
grow to the size of the whole pool. So it keeps a limited number of blocks, and doubles this limit each time a prompt
asks for a block that was evicted because of the limit: the cache grows as far as prompts use it.
"""

from __future__ import annotations

from collections import OrderedDict


class CacheGrowth:
    """Doubles the limit for each prompt that lost a block by it. Remembers the last `num_blocks` lost blocks."""

    def __init__(self, num_blocks: int, num_kept: int | None) -> None:
        """`num_blocks`: of the pool. `num_kept`: the first limit of cached blocks; None: no limit."""
        self._num_blocks = num_blocks
        self.limit = num_blocks if num_kept is None else min(num_blocks, num_kept)
        self._lost: OrderedDict[bytes, None] = OrderedDict()  # hashes of blocks evicted at the limit, oldest first

    def is_full(self, num_cached: int) -> bool:
        """Returns whether a new block shall come from the `num_cached` cached blocks although untouched ones are left.

        Never with a limit that the pool cannot exceed.
        """
        return self.limit < self._num_blocks and num_cached >= self.limit

    def lose(self, content: bytes) -> None:
        """Records that a block was evicted because of the limit."""
        self._lost[content] = None
        if len(self._lost) > self._num_blocks:
            self._lost.popitem(last=False)

    def miss(self, content: bytes) -> None:
        """Doubles the limit if this block, the first that a prompt misses, was lost because of it. Counts it once."""
        if content in self._lost:
            del self._lost[content]
            self.limit = min(self._num_blocks, 2 * self.limit)
            if self.limit == self._num_blocks:
                self._lost.clear()
