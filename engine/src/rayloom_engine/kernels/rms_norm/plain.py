"""RMS normalisation by torch, with a shortcut for one float32 row on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
) -> torch.Tensor:
    """Implements RmsNorm."""
    if residual_D is not None:
        x_D = residual_D.add_(x_D)
    if x_D.dtype is torch.float32 and x_D.numel() == x_D.shape[-1] and x_D.device.type == "cpu":
        # A single row, as in the decode steps of one sequence. This code calls three of torch's operations, and torch's
        # own function calls six.
        row_D = x_D.view(-1)
        return torch.mul(x_D, weight_D).mul_((float(row_D.dot(row_D)) / row_D.shape[0] + eps) ** -0.5)
    return F.rms_norm(x_D, weight_D.shape, weight_D, eps)
