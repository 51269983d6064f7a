"""The operation as a sequence of its parts. The sequence of the parts' reference backends defines the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.kv_write import KvWrite
from rayloom_engine.kernels.rms_norm import RmsNorm
from rayloom_engine.kernels.rotary import Rotary, RotaryTables
from rayloom_engine.kernels.rotary_kv_write import QkNorms


@dataclass(frozen=True, slots=True)
class ComposedRotaryKvWrite:
    """Implements RotaryKvWrite."""

    rms_norm: RmsNorm
    rotary: Rotary
    kv_write: KvWrite

    def __call__(
        self,
        qkv_TXD: torch.Tensor,
        pages: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        tables: RotaryTables,
        norms: QkNorms | None,
    ) -> torch.Tensor:
        num_rotated = qkv_TXD.shape[1] - pages.shape[3]
        num_queries = num_rotated - pages.shape[3]
        query_key_TXD = qkv_TXD[:, :num_rotated]
        if norms is not None:
            for heads_TXD, weight_D in (
                (query_key_TXD[:, :num_queries], norms.query_D),
                (query_key_TXD[:, num_queries:], norms.key_D),
            ):
                heads_TXD.copy_(self.rms_norm(heads_TXD, weight_D, norms.eps))
        self.rotary.rotate(query_key_TXD, tables)
        self.kv_write(pages, qkv_TXD[:, num_queries:], slot_mapping_T)
        return qkv_TXD[:, :num_queries]
