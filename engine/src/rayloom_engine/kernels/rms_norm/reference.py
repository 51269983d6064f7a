"""RMS normalisation in float32, as the formula is written."""

from __future__ import annotations

import torch


def rms_norm(
    x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
) -> torch.Tensor:
    """Implements RmsNorm."""
    if residual_D is not None:
        x_D = residual_D.add_(x_D)
    x = x_D.float()
    return (weight_D.float() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)).to(x_D.dtype)
