"""One layer's self-attention: fused q, k and v, optional norms of q and k, rotation, cache, attention, output.

Legend: T tokens of the step, D model width, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.kv_cache import KvCache
from rayloom_engine.kernels.paged_attention import AttentionPlan, paged_attention
from rayloom_engine.kernels.rms_norm import rms_norm
from rayloom_engine.kernels.rotary import rotary
from rayloom_engine.layers.linear import Linear


@dataclass(slots=True, kw_only=True)
class Attention:
    layer: int  # index into the cache
    num_heads: int  # of this rank, as everything here
    num_kv_heads: int
    head_dim: int
    window: int | None  # how many positions a token sees, itself included; None = all
    eps: float
    qkv: Linear  # rows: H * d of q, then K * d of k, then K * d of v
    out: Linear
    q_norm_d: torch.Tensor | None = None  # both or neither
    k_norm_d: torch.Tensor | None = None

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        cache: KvCache,
    ) -> torch.Tensor:
        """[T, D], this rank's share of the sum. Writes the keys and values of the T tokens into the cache."""
        num_tokens = hidden_TD.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        qkv_TXd = self.qkv(hidden_TD).view(num_tokens, num_rotated + self.num_kv_heads, self.head_dim)
        query_key_TXd = qkv_TXd[:, :num_rotated]
        if self.q_norm_d is not None and self.k_norm_d is not None:
            for heads_TXd, norm_d in (
                (query_key_TXd[:, : self.num_heads], self.q_norm_d),
                (query_key_TXd[:, self.num_heads :], self.k_norm_d),
            ):
                heads_TXd.copy_(rms_norm(heads_TXd, norm_d, self.eps))
        rotary(query_key_TXd, *angles)
        cache.write(self.layer, qkv_TXd[:, self.num_heads :], plan.batch.slot_mapping_T)
        attended_THd = paged_attention(qkv_TXd[:, : self.num_heads], cache.pages[self.layer], plan, self.head_dim**-0.5)
        return self.out(attended_THd.view(num_tokens, self.num_heads * self.head_dim))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.out)
