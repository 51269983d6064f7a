"""The paged KV cache of one rank, and the description of one step's batch that every attention body reads.

Legend: S sequences of the step, B blocks in a table, T tokens of the step, N blocks in the cache, P positions in a
block, H key/value heads, D head size.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """What one step computes, and where each sequence's keys and values are.

    The tokens of a sequence are contiguous in T, sequences in the order of the tuples. Sequences with one token may
    come first (the runner orders them so), which makes their rows one contiguous slice.
    """

    query_lens: tuple[int, ...]  # tokens computed in this step, per sequence, each >= 1
    context_lens: tuple[int, ...]  # tokens in the cache after this step, per sequence, each >= query_len
    block_tables_SB: torch.Tensor  # int64, on the model's device, padded with 0
    slot_mapping_T: torch.Tensor  # int64, on the model's device: block id * block size + offset of each token


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of every layer: `pages[layer]` is [N, P, 2, H, D], a token's keys before its values.

    Side by side, because a small step is a matter of few calls: one writes both, one gathers both. Their type may be
    narrower than the compute type: keys and values are rounded as they are written.
    """

    pages: list[torch.Tensor]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvCache:
        """A cache of zeros. On CPU no page of it is touched, so it costs memory only as blocks are first written."""
        shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
        return cls(pages=[_zeros(shape, dtype, device) for _ in range(num_layers)])

    @property
    def num_blocks(self) -> int:
        return self.pages[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.pages[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.pages)

    def write(self, layer: int, key_value_T2HD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
        """Puts the step's keys and values of one layer into the slots. [T, 2 * H, D] does as well."""
        pages = self.pages[layer]
        slots = pages.view(pages.shape[0] * pages.shape[1], -1)
        slots.index_copy_(0, slot_mapping_T, key_value_T2HD.reshape(slot_mapping_T.shape[0], -1).to(pages.dtype))

    def clear_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Fills blocks with zeros in all layers."""
        indices = torch.tensor(block_ids, dtype=torch.int64, device=self.pages[0].device)
        for pages in self.pages:
            pages.index_fill_(0, indices, 0)

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copies whole blocks, (from, to) each, in all layers. No block may be both a source and a destination."""
        if not pairs:
            return
        device = self.pages[0].device
        sources = torch.tensor([source for source, _ in pairs], dtype=torch.int64, device=device)
        destinations = torch.tensor([destination for _, destination in pairs], dtype=torch.int64, device=device)
        for pages in self.pages:
            pages.index_copy_(0, destinations, pages.index_select(0, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because attention reads whole blocks and masks: garbage that is not a number would pass through the mask.

    torch.zeros would write every page and so take the memory at once; an anonymous mapping is zero without that.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_elements = math.prod(shape)
    mapping = mmap.mmap(-1, num_elements * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements).view(shape)
