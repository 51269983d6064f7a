"""The gated activation of the MLP: silu(gate) * up, where silu(x) = x / (1 + exp(-x)) (arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """[T, F / 2] from [T, F], whose first half is the gate and second half the values."""
    half = gate_up_TF.shape[-1] // 2
    return F.silu(gate_up_TF[..., :half]).mul_(gate_up_TF[..., half:])
