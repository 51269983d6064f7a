"""Everything between the projection and attention: norms of queries and keys, rotation, and the write into the cache.

    q = rotate(norm(q)),   k = rotate(norm(k)),   pages[slot] = (k, v)

`kernels/rms_norm`, `kernels/rotary` and `kernels/kv_write` define the parts. Models without norms of queries and keys
leave the norms out.

Legend: T tokens of the step, X = H + 2 K heads of the projection (H query heads, then K key heads, then K value heads),
D head size, N blocks in the cache, P positions in a block.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from rayloom_engine.kernels.kv_write import choose_kv_write
from rayloom_engine.kernels.rms_norm import choose_rms_norm
from rayloom_engine.kernels.rotary import Rotary, RotaryTables
from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


class QkNorms(NamedTuple):
    """The weights of the norms of queries and keys, each [D], and the epsilon of both."""

    query_D: torch.Tensor
    key_D: torch.Tensor
    eps: float


class RotaryKvWrite(Protocol):
    def __call__(
        self,
        qkv_TXD: torch.Tensor,
        pages: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        tables: RotaryTables,
        norms: QkNorms | None,
    ) -> torch.Tensor:
        """Returns the queries, [T, H, D], which are a view of qkv.

        qkv is contiguous. Afterwards its content is undefined, except the queries. `pages` is one layer's cache,
        [N, P, 2, K, D]; keys and values are rounded to its type. slot_mapping_T is int64: block id * P + offset. The
        rank's rotary backend has made the tables.
        """


def choose_rotary_kv_write(target: Target, rotary: Rotary) -> RotaryKvWrite:
    """Returns the backend for the target. `rotary`: the rank's rotary backend, which makes the tables."""
    if uses_triton(target):
        from rayloom_engine.kernels.rotary_kv_write import triton_gpu

        return triton_gpu.rotary_kv_write
    from rayloom_engine.kernels.rotary_kv_write.composed import ComposedRotaryKvWrite

    return ComposedRotaryKvWrite(choose_rms_norm(target), rotary, choose_kv_write(target))
