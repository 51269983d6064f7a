"""Product and gated activation of an MLP in one operation, where that is faster than one after the other.

y = silu(x @ gate.T) * (x @ up.T)

`gate` is the first half of the rows of the weight, and `up` is the second half.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


class GatedLinear(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns [..., F / 2] from x [..., D] and weight [F, D]."""


def choose_gated_linear(target: Target) -> GatedLinear | None:
    """Returns None if the target has no such operation. Then the caller multiplies and activates."""
    if not uses_triton(target):
        return None
    from rayloom_engine.kernels.gated_linear import triton_gpu

    return triton_gpu.gated_linear
