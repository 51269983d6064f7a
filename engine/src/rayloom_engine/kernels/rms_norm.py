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
    return F.rms_norm(x_D, weight_D.shape, weight_D, eps)
