"""Copies between the KV blocks of a rank on the C library and its host memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.kv.library_pages import LibraryPages


class LibraryHostBlocks:
    """`num_slots` host slots. A host slot has a block of all layers, so the copy of a block is contiguous."""

    def __init__(self, memory: memoryview, cache: LibraryPages, num_slots: int) -> None:
        """`memory` must have room for the host slots; what it holds already are copies of earlier processes."""
        block = cache.pages[0][0]
        shape = (num_slots, len(cache.pages), *block.shape)
        count = num_slots * len(cache.pages) * block.size
        slots: Array = np.frombuffer(memory, dtype=block.dtype, count=count).reshape(shape)
        self._layers = [slots[:, layer] for layer in range(len(cache.pages))]
        self._pages = cache.pages

    def store(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies blocks to host slots; each pair is (block, host slot)."""
        blocks, slots = _columns(pairs)
        for pages, layer in zip(self._pages, self._layers, strict=True):
            layer[slots] = pages[blocks]

    def load(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies host slots to blocks; each pair is (host slot, block)."""
        slots, blocks = _columns(pairs)
        for pages, layer in zip(self._pages, self._layers, strict=True):
            pages[blocks] = layer[slots]


def _columns(pairs: tuple[tuple[int, int], ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    table = np.array(pairs, dtype=np.int64)
    return table[:, 0], table[:, 1]
