"""The gated activation in a few calls of torch, in the type of its input."""

from __future__ import annotations

import torch


def clamped_silu_mul(gate_up_TF: torch.Tensor, *, slope: float, limit: float) -> torch.Tensor:
    """Implements ClampedSiluMul."""
    half = gate_up_TF.shape[-1] // 2
    gate_TF = gate_up_TF[..., :half].clamp(max=limit)
    gate_TF.mul_((slope * gate_TF).sigmoid_())
    return gate_up_TF[..., half:].clamp(-limit, limit).add_(1.0).mul_(gate_TF)
