"""The paged KV cache of a rank on the C library: blocks whose content only the library reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType
from rayloom_engine.cpu_library.huge_mapping import huge_mapping
from rayloom_engine.kv.layout import KvLayout


@dataclass(frozen=True, slots=True)
class LibraryPages:
    """The keys and values of every layer. `pages[layer]` has a block in each row of its first axis."""

    pages: list[Array]

    @classmethod
    def allocate(cls, layout: KvLayout, *, num_blocks: int, block_size: int, dtype: ElementType) -> LibraryPages:
        """Returns a cache of zeros. The system allocates the memory of a block when it is first written.

        Uninitialised memory could hold a NaN, which would reach the result of attention. An anonymous mapping reads as
        zeros without a write.
        """
        elements = ELEMENTS[dtype]
        shape = (num_blocks, block_size, 2, layout.num_kv_heads, layout.head_dim)
        num_bytes = math.prod(shape) * elements.itemsize
        return cls(
            [np.frombuffer(huge_mapping(num_bytes), dtype=elements).reshape(shape) for _ in range(layout.num_layers)]
        )

    @property
    def num_blocks(self) -> int:
        return len(self.pages[0])

    @property
    def block_size(self) -> int:
        return len(self.pages[0][0])

    def clear_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Fills blocks with zeros in all layers."""
        indices = np.array(block_ids, dtype=np.int64)
        for pages in self.pages:
            pages[indices] = 0

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks in all layers; each pair is (from, to).

        No block may be both a source and a destination.
        """
        if not pairs:
            return
        sources = np.array([source for source, _ in pairs], dtype=np.int64)
        destinations = np.array([destination for _, destination in pairs], dtype=np.int64)
        for pages in self.pages:
            pages[destinations] = pages[sources]
