"""Copies between the KV blocks of a rank on torch and its host memory.

On a GPU, all copies run on the stream of the steps. So a store sees the blocks of all earlier steps, and a step sees
what was loaded before it. The host memory is pinned, so that the GPU copies at full speed, and this process need not
wait for it. Blocks are gathered in a buffer on the GPU, because a block has a piece in every layer, and thousands
of small copies over the bus would take longer than the data.

S: host slots. N: blocks of a round. E: elements of a block in all layers.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from rayloom_engine.kv.cache import KvPages

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 32 << 20  # of the buffer on the device; more blocks are copied in several rounds

Pairs = tuple[tuple[int, int], ...]


class HostBlocks:
    """`num_slots` host slots. A host slot has a block of all layers, so the copy of a block is contiguous."""

    def __init__(self, memory: memoryview, cache: KvPages, num_slots: int, *, is_pinned: bool = False) -> None:
        """`memory` must have room for the host slots; what it holds already are copies of earlier processes.

        `is_pinned`: the memory was pinned for the device of the cache (`pin`).
        """
        self._pages = cache.pages
        self._device = cache.pages[0].device
        self._dtype = cache.pages[0].dtype
        self._is_pinned = is_pinned
        # positions of each layer's piece in a slot, in elements
        self._spans: list[tuple[int, int]] = []
        end = 0
        for pages in cache.pages:
            begin, end = end, end + pages[0].numel()
            self._spans.append((begin, end))
        self._slots_SE = torch.frombuffer(memory, dtype=self._dtype, count=num_slots * end).view(num_slots, end)
        slot_bytes = end * self._dtype.itemsize
        self._round_blocks = max(1, _BUFFER_BYTES // slot_bytes)

    def store(self, pairs: Pairs) -> None:
        """Copies blocks to host slots; each pair is (block, host slot)."""
        for some in self._rounds(pairs):
            blocks, slots = self._indices(some)
            buffer_NE = self._buffer(len(some))
            for pages, (begin, end) in zip(self._pages, self._spans, strict=True):
                buffer_NE[:, begin:end] = pages.index_select(0, blocks).flatten(1)
            if self._device.type == "cpu":
                self._slots_SE.index_copy_(0, slots, buffer_NE)
                continue
            for row, (_, slot) in enumerate(some):
                self._slots_SE[slot].copy_(buffer_NE[row], non_blocking=self._is_pinned)

    def load(self, pairs: Pairs) -> None:
        """Copies host slots to blocks; each pair is (host slot, block)."""
        for some in self._rounds(pairs):
            slots, blocks = self._indices(some)
            if self._device.type == "cpu":
                buffer_NE = self._slots_SE.index_select(0, slots)
            else:
                buffer_NE = self._buffer(len(some))
                for row, (slot, _) in enumerate(some):
                    buffer_NE[row].copy_(self._slots_SE[slot], non_blocking=self._is_pinned)
            for pages, (begin, end) in zip(self._pages, self._spans, strict=True):
                pages.index_copy_(0, blocks, buffer_NE[:, begin:end].view(-1, *pages.shape[1:]))

    def _rounds(self, pairs: Pairs) -> list[Pairs]:
        return [pairs[first : first + self._round_blocks] for first in range(0, len(pairs), self._round_blocks)]

    def _indices(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both columns of the pairs, on the device of the cache."""
        table = torch.tensor(pairs, dtype=torch.int64, device=self._device)
        return table[:, 0].contiguous(), table[:, 1].contiguous()

    def _buffer(self, num_blocks: int) -> torch.Tensor:
        # From torch's own allocator: it gives the memory to others only after the copies on this stream.
        return torch.empty((num_blocks, self._spans[-1][1]), dtype=self._dtype, device=self._device)


def pin(memory: memoryview) -> bool:
    """Pins host memory for the CUDA device of this process. Returns False, and logs why, if CUDA refuses."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    code = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if code == 0:
        return True
    logger.warning("the host memory for KV blocks cannot be pinned (CUDA error %d), so its copies are slow", code)
    _clear_last_error(Path("/proc/self/maps").read_text())
    return False


def _clear_last_error(maps: str) -> None:
    """Clears the error that CUDA keeps for this thread: torch would raise it after its next kernel.

    `maps`: the mapped files of this process, among them the CUDA runtime that torch uses. torch has no function for
    this.
    """
    runtimes = {line.split()[-1] for line in maps.splitlines() if "/libcudart" in line}
    for runtime in sorted(runtimes):
        ctypes.CDLL(runtime).cudaGetLastError()
