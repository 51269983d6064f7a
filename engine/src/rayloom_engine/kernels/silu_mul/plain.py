"""The gated activation in two calls of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """Implements SiluMul."""
    half = gate_up_TF.shape[-1] // 2
    return F.silu(gate_up_TF[..., :half]).mul_(gate_up_TF[..., half:])
