"""The gated activation in float32, as the formula is written."""

from __future__ import annotations

import torch


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """Implements SiluMul."""
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TF.dtype)
