"""Self-attention of a layer: fused projection of q, k, v; norms; rotation; cache write; attention; output projection.

Legend: T tokens of the step, D model width, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayloom_engine.kernels.attention import AttentionPlan
from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.rotary import RotaryTables
from rayloom_engine.kernels.rotary_kv_write import QkNorms
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The inputs of a step that all layers share."""

    rotary_tables: Mapping[int | None, RotaryTables]  # window -> tables
    plans: Mapping[int | None, AttentionPlan]  # window -> plan
    slot_mapping_T: torch.Tensor  # int64: each token's position in the cache, block id * block size + offset
    cache: KvPages


@dataclass(slots=True, kw_only=True)
class Attention:
    layer: int  # index into the cache
    num_heads: int  # query heads of this rank; all sizes here are those of this rank
    num_kv_heads: int
    head_dim: int
    window: int | None  # number of positions that a token sees, including itself; None: all
    eps: float
    score_scale: float  # factor of the products of queries and keys
    score_cap: float | None  # a score s becomes cap * tanh(s / cap)
    qkv: Linear  # rows: H * d of q, then K * d of k, then K * d of v
    out: Linear
    kernels: KernelSet
    q_norm_d: torch.Tensor | None = None  # q_norm_d and k_norm_d are both set, or both None
    k_norm_d: torch.Tensor | None = None
    sinks_H: torch.Tensor | None = None  # float32: one more score in the softmax of each query head, without a value
    has_wide_norms: bool = False  # q_norm and k_norm each normalise all heads together

    def __call__(self, hidden_TD: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Returns [T, D], this rank's part of the sum over ranks. Writes the T keys and values into the cache."""
        kernels = self.kernels
        num_tokens = hidden_TD.shape[0]
        num_parts = self.num_heads + 2 * self.num_kv_heads
        qkv_TXd = self.qkv(hidden_TD).view(num_tokens, num_parts, self.head_dim)
        norms = None
        if self.has_wide_norms:
            self._normalise_all_heads(qkv_TXd)
        elif self.q_norm_d is not None and self.k_norm_d is not None:
            norms = QkNorms(self.q_norm_d, self.k_norm_d, self.eps)
        pages = step.cache.pages[self.layer]
        query_THd = kernels.rotary_kv_write(qkv_TXd, pages, step.slot_mapping_T, step.rotary_tables[self.window], norms)
        plan = step.plans[self.window]
        attended_THd = plan.attend(query_THd, pages, self.score_scale, soft_cap=self.score_cap, sinks_H=self.sinks_H)
        return self.out(attended_THd.view(num_tokens, self.num_heads * self.head_dim))

    def _normalise_all_heads(self, qkv_TXd: torch.Tensor) -> None:
        """Normalises queries and keys in place, each over all heads together."""
        assert self.q_norm_d is not None and self.k_norm_d is not None
        end = self.num_heads
        for heads, weight in ((slice(0, end), self.q_norm_d), (slice(end, end + self.num_kv_heads), self.k_norm_d)):
            rows_TXd = qkv_TXd[:, heads]
            normed = self.kernels.rms_norm(rows_TXd.flatten(1).contiguous(), weight, self.eps)
            rows_TXd.copy_(normed.view(rows_TXd.shape))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.out)
