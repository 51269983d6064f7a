"""The gated activation of the MLP (arXiv:2002.05202).

y = silu(gate) * up,   silu(x) = x / (1 + exp(-x))
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


class SiluMul(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """Returns [T, F / 2] from [T, F], whose first half is the gate and whose second half is `up`."""


def choose_silu_mul(target: Target) -> SiluMul:
    if target.backend == "reference":
        from rayloom_engine.kernels.silu_mul import reference

        return reference.silu_mul
    if uses_triton(target):
        from rayloom_engine.kernels.silu_mul import triton_gpu

        return triton_gpu.silu_mul
    from rayloom_engine.kernels.silu_mul import plain

    return plain.silu_mul
