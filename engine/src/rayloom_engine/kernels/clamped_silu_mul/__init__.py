"""The gated activation of gpt-oss's experts (transformers, GptOssExperts), a SiLU with clamped inputs.

y = (u + 1) * g * sigmoid(slope * g),   g = min(gate, limit),   u = up clamped to [-limit, limit]
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target


class ClampedSiluMul(Protocol):
    def __call__(self, gate_up_TF: torch.Tensor, *, slope: float, limit: float) -> torch.Tensor:
        """Returns [T, F / 2] from [T, F], whose first half is the gate and whose second half is `up`."""


def choose_clamped_silu_mul(target: Target) -> ClampedSiluMul:
    if target.backend == "reference":
        from rayloom_engine.kernels.clamped_silu_mul import reference

        return reference.clamped_silu_mul
    from rayloom_engine.kernels.clamped_silu_mul import plain

    return plain.clamped_silu_mul
