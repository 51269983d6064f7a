"""Root mean square normalisation, together with the residual addition before it.

    y = weight * x / sqrt(mean(x ** 2) + eps)          (Zhang and Sennrich 2019, arXiv:1910.07467)

The mean is computed in float32, because a sum of squares overflows float16 and loses most digits in bfloat16.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


class RmsNorm(Protocol):
    def __call__(
        self, x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns x normalised over its last dimension, in x's type. x may have any number of leading dimensions.

        With a residual: first adds x to the residual in place, then normalises the sum. x itself is not changed.
        """


def choose_rms_norm(target: Target) -> RmsNorm:
    if target.backend == "reference":
        from rayloom_engine.kernels.rms_norm import reference

        return reference.rms_norm
    if uses_triton(target):
        from rayloom_engine.kernels.rms_norm import triton_gpu

        return triton_gpu.rms_norm
    from rayloom_engine.kernels.rms_norm import plain

    return plain.rms_norm
