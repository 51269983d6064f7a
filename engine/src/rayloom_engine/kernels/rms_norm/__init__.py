"""Root mean square normalisation, with the residual addition that precedes it in every layer.

    y = weight * x / sqrt(mean(x ** 2) + eps)          (Zhang and Sennrich 2019, arXiv:1910.07467)

The mean is taken in float32, because a sum of squares overflows float16 and loses most digits in bfloat16.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target


class RmsNorm(Protocol):
    def __call__(
        self, x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The normalised x over its last dimension, in x's type. x may have any number of dimensions before it.

        With a residual, `residual += x` happens first and in place, and the sum is normalised. x itself is left alone.
        """


def choose_rms_norm(target: Target) -> RmsNorm:
    if target.backend == "reference":
        from rayloom_engine.kernels.rms_norm import reference

        return reference.rms_norm
    from rayloom_engine.kernels.rms_norm import plain

    return plain.rms_norm
