"""Root mean square normalisation, with the residual addition that always goes before it.

    y = weight * x / sqrt(mean(x ** 2) + eps)          (Zhang and Sennrich 2019, arXiv:1910.07467)

The mean is taken in float32, because a sum of squares overflows float16 and loses most digits in bfloat16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
) -> torch.Tensor:
    """The normalised x over its last dimension, in x's type. x may have any number of dimensions before it.

    With a residual, `residual += x` in place first, and the sum is what is normalised.
    """
    if residual_D is not None:
        x_D = residual_D.add_(x_D)
    if x_D.dtype is torch.float32 and x_D.numel() == x_D.shape[-1] and x_D.device.type == "cpu":
        # One row, as in every step of a single stream: three calls instead of the six behind torch's own.
        row_D = x_D.view(-1)
        return torch.mul(x_D, weight_D).mul_((float(row_D.dot(row_D)) / row_D.shape[0] + eps) ** -0.5)
    return F.rms_norm(x_D, weight_D.shape, weight_D, eps)
