"""What each op means, in plain torch and float32, written to be read. Tests compare the other bodies with it."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.kv_cache import AttentionBatch


def paged_attention_reference(
    query_THD: torch.Tensor,
    pages: torch.Tensor,
    batch: AttentionBatch,
    *,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention one token and one head at a time, [T, H, D]."""
    num_heads = query_THD.shape[1]
    block_size, num_kv_heads = pages.shape[1], pages.shape[3]
    out_THD = torch.empty_like(query_THD)
    row = 0
    for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for position in range(context_len - query_len, context_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(first, position + 1)
            blocks, offsets = batch.block_tables_SB[index][seen // block_size], seen % block_size
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                keys = pages[blocks, offsets, 0, kv_head].float()
                values = pages[blocks, offsets, 1, kv_head].float()
                weights = torch.softmax(scale * (keys @ query_THD[row, head].float()), dim=0)
                out_THD[row, head] = (weights @ values).to(out_THD.dtype)
            row += 1
    return out_THD


def rms_norm_reference(x_D: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_D.float()
    return (weight_D.float() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)).to(x_D.dtype)


def rotary_reference(x_THD: torch.Tensor, angles_Th: torch.Tensor) -> torch.Tensor:
    """`angles_Th` is [T, D / 2], in radians."""
    first, second = x_THD.float().chunk(2, dim=-1)
    cos, sin = angles_Th.cos()[:, None, :], angles_Th.sin()[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)


def silu_mul_reference(gate_up_TF: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TF.dtype)
