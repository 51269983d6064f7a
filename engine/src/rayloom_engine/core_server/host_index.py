"""HostIndex: the index of the copies in the ranks' host memory, in a file that outlives this EngineCore process.

The index is a table with an entry for each host slot: the hash of the block's content, and a checksum. An entry is
written after all ranks have stored the copy, and cleared before another plan writes the host slot. So whenever this
process dies, the entries in the file are right, and its successor may load these copies. The file belongs to one set of
ids, one of each rank's memory: if a rank has memory with another id, the successor makes a new index.
"""

from __future__ import annotations

import logging
import struct
import zlib

from rayloom_engine.core.host_tier import HostTier
from rayloom_engine.kv.host_file import HostFile, file_name

logger = logging.getLogger(__name__)

_ENTRY = struct.Struct("=16sI")  # hash, checksum of the hash
_NO_ENTRY = bytes(_ENTRY.size)


class HostIndex:
    """Implements SavedIndex."""

    def __init__(self, token: str, memory: tuple[str, ...], num_slots: int) -> None:
        """`token`: the engine's. `memory`: an id of each rank's memory. Raises OSError."""
        self._num_slots = num_slots
        self._file = HostFile.open(file_name(token, "index"), " ".join(memory), num_slots * _ENTRY.size)

    def close(self) -> None:
        self._file.close()

    def keep(self, slot: int, content: bytes) -> None:
        _ENTRY.pack_into(self._file.memory, slot * _ENTRY.size, content, zlib.crc32(content))

    def drop(self, slot: int) -> None:
        begin = slot * _ENTRY.size
        self._file.memory[begin : begin + _ENTRY.size] = _NO_ENTRY

    def entries(self) -> list[tuple[int, bytes]]:
        table = bytes(self._file.memory[: self._num_slots * _ENTRY.size])
        found = enumerate(_ENTRY.iter_unpack(table))
        return [(slot, content) for slot, (content, checksum) in found if zlib.crc32(content) == checksum]


def begin_host_epoch(tier: HostTier | None, memory: tuple[str, ...], token: str) -> None:
    """Prepares the copies for an epoch. `memory`: an id of each rank's memory; "" if a rank has none."""
    if tier is None and any(memory):
        logger.warning("a rank has no host memory for copies of KV blocks, so this core makes none")
    if tier is None or memory == tier.memory:
        return
    had_copies = tier.slots.num_used > 0
    old = tier.slots.saved_index
    if isinstance(old, HostIndex):
        old.close()  # the new index is a file of the same name, which must not be locked
    if not all(memory):
        logger.warning("a rank has no host memory for copies of KV blocks, so no copies are made in this epoch")
        tier.begin_epoch(memory)
    else:
        index = None
        try:
            index = HostIndex(token, memory, tier.slots.num_slots)
        except OSError as error:
            logger.warning(
                "copies of KV blocks will not outlive this process: no file for their index in /dev/shm (%s)", error
            )
        tier.begin_epoch(memory, index)
        if tier.slots.num_used:
            logger.info("found copies of %d KV blocks in host memory", tier.slots.num_used)
    if had_copies:
        logger.warning("a rank has other host memory than before, or none, so the copies of KV blocks are dropped")
