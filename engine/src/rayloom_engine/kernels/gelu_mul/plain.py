"""The gated activation in two calls of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """Implements GeluMul."""
    half = gate_up_TF.shape[-1] // 2
    return F.gelu(gate_up_TF[..., :half], approximate="tanh").mul_(gate_up_TF[..., half:])
