"""The gated activation in float32, as the formula is written."""

from __future__ import annotations

import math

import torch


def gelu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """Implements GeluMul."""
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    return (gate / 2 * (1 + tanh) * up).to(gate_up_TF.dtype)
