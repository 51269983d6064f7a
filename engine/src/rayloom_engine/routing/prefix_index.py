"""PrefixIndex: the KV blocks that an engine has cached, from the CacheChanges of its core. Pure.

The index keeps only HASH_BYTES = 8 bytes of a block's hash. The probability that two of n blocks have the same bytes is
n**2 / 2**65: 3 in 100 million for a million blocks (16 million tokens). The engine itself compares whole hashes. So two
blocks with the same bytes may lead to the choice of a worse engine, but never change an answer.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

from rayloom_engine.protocol.messages import HASH_BYTES, CacheChanges

# Limit of blocks in the index of one engine: 71 MB. Further blocks of the engine count as not cached.
MAX_BLOCKS = 2**20


def cut_hashes(hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Returns hashes of blocks in the short form of the index, which is the same for all engines."""
    return _numbers(b"".join([content[:HASH_BYTES] for content in hashes]))


class PrefixIndex:
    """A front's copy of a core's prefix index.

    It is empty until the core sends its whole index, part by part. If changes are missing, it becomes empty again.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = 0  # tokens in a block; 0 = unknown
        self.is_complete = False  # True: the whole index has arrived, and every change since then
        self._max_blocks = max_blocks
        self._start = -1
        self._number = -1
        self._num_parts_left = 0
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, changes: CacheChanges) -> bool:
        """Applies a message of the core. Returns False if messages are missing: then request the whole index."""
        if changes.num_parts:
            return self._apply_part(changes)
        if not self.is_complete or (changes.start, changes.number) != (self._start, self._number + 1):
            self.forget()
            return False
        self._number = changes.number
        self._blocks.difference_update(_numbers(changes.removed))
        self._add(_numbers(changes.added))
        return True

    def forget(self) -> None:
        """Empties the index. Called if its engine was lost or changes are missing. The next whole index fills it."""
        self.is_complete = False
        self._num_parts_left = 0
        self._blocks.clear()

    def num_leading(self, blocks: Sequence[int], also: Collection[int] = ()) -> int:
        """Returns how many of a prompt's blocks, from the first one on, are cached or in `also`."""
        known = self._blocks
        for place, block in enumerate(blocks):
            if block not in known and block not in also:
                return place
        return len(blocks)

    def _apply_part(self, changes: CacheChanges) -> bool:
        if changes.part == 0:
            self.forget()
            self.block_size = changes.block_size
            self._start = changes.start
            self._number = changes.number
            self._num_parts_left = changes.num_parts
        elif (changes.start, changes.number, changes.num_parts - changes.part) != (
            self._start,
            self._number,
            self._num_parts_left,
        ):
            self.forget()
            return False
        self._add(_numbers(changes.added))
        self._num_parts_left -= 1
        self.is_complete = self._num_parts_left == 0
        return True

    def _add(self, blocks: Sequence[int]) -> None:
        room = self._max_blocks - len(self._blocks)
        self._blocks.update(blocks if len(blocks) <= room else blocks[:room])


def _numbers(joined: bytes) -> tuple[int, ...]:
    if len(joined) % HASH_BYTES:
        raise ValueError(f"hashes of {len(joined)} bytes, not a multiple of {HASH_BYTES}")
    return struct.unpack(f"<{len(joined) // HASH_BYTES}Q", joined)
