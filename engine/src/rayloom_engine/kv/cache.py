"""The paged KV cache of one rank on torch. kv/library_pages.py has the cache of a rank on the C library.

Legend: N blocks in the cache, P positions in a block, H key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rayloom_engine.cpu_library.huge_mapping import huge_mapping
from rayloom_engine.kv.layout import KvLayout


@dataclass(frozen=True, slots=True)
class KvPages:
    """The keys and values of every layer: `pages[layer]` is [N, P, 2, H, D]. A token's keys precede its values.

    Keys and values lie next to each other, so that one call writes both, and one call gathers both. In a small step,
    the number of calls decides the speed. The pages may have a narrower type than the compute type; keys and values
    are then rounded when they are written.
    """

    pages: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, layout: KvLayout, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvPages:
        """Returns a cache of zeros. On CPU, the system allocates the memory of a block when it is first written."""
        shapes = [(num_blocks, block_size, 2, num_kv_heads, head_dim) for num_kv_heads, head_dim in layout.sizes]
        return cls(pages=[_zeros(shape, dtype, device) for shape in shapes])

    @property
    def num_blocks(self) -> int:
        return self.pages[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.pages[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.pages)

    def clear_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Fills blocks with zeros in all layers."""
        indices = torch.tensor(block_ids, dtype=torch.int64, device=self.pages[0].device)
        for pages in self.pages:
            pages.index_fill_(0, indices, 0)

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks in all layers; each pair is (from, to).

        No block may be both a source and a destination.
        """
        if not pairs:
            return
        device = self.pages[0].device
        sources = torch.tensor([source for source, _ in pairs], dtype=torch.int64, device=device)
        destinations = torch.tensor([destination for _, destination in pairs], dtype=torch.int64, device=device)
        for pages in self.pages:
            pages.index_copy_(0, destinations, pages.index_select(0, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of zeros.

    Uninitialised memory could hold a NaN, which would reach the result of attention, because a mask does not hide a
    NaN. On CPU, torch.zeros would write every page and so allocate all memory at once. An anonymous mapping reads as
    zeros without a write.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_elements = math.prod(shape)
    mapping = huge_mapping(num_elements * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements).view(shape)
