"""Attention in float32, one token and one head at a time. Tests compare the other backends with this backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """Implements AttentionPlan."""

    batch: AttentionBatch
    window: int | None

    def attend(
        self,
        query_THD: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention, [T, H, D]. A score s becomes soft_cap * tanh(s / soft_cap).

        The sink of a head is an additional score without a value vector: it only adds to the divisor of the weights.
        """
        batch = self.batch
        num_heads = query_THD.shape[1]
        block_size, num_kv_heads = pages.shape[1], pages.shape[3]
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        row = 0
        for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            for position in range(context_len - query_len, context_len):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                seen = torch.arange(first, position + 1, device=query_THD.device)
                blocks = batch.block_tables_SB[index][seen // block_size]
                offsets = seen % block_size
                for head in range(num_heads):
                    kv_head = head * num_kv_heads // num_heads
                    keys = pages[blocks, offsets, 0, kv_head].float()
                    values = pages[blocks, offsets, 1, kv_head].float()
                    scores = scale * (keys @ query_THD[row, head].float())
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    if sinks_H is not None:
                        scores = torch.cat((scores, sinks_H[head].float()[None]))
                    weights = torch.softmax(scores, dim=0)[: len(seen)]
                    out_THD[row, head] = (weights @ values).to(out_THD.dtype)
                row += 1
        return out_THD


def plan_attention(
    batch: AttentionBatch,
    *,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    compute_dtype: torch.dtype,
) -> ReferencePlan:
    """Implements PlanAttention. The reference needs no preparation."""
    return ReferencePlan(batch=batch, window=window)
