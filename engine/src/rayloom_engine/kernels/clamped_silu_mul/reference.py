"""The gated activation in float32, as the formula is written."""

from __future__ import annotations

import torch


def clamped_silu_mul(gate_up_TF: torch.Tensor, *, slope: float, limit: float) -> torch.Tensor:
    """Implements ClampedSiluMul."""
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(slope * gate)).to(gate_up_TF.dtype)
