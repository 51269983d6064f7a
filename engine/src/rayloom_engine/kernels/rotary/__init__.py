"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints.

With h = R / 2 and angle a = position * frequency[i], the pair of elements (i, i + h) is rotated by a:

    out[i] = x[i] cos(a) - x[i + h] sin(a),   out[i + h] = x[i + h] cos(a) + x[i] sin(a)

Rotation has two phases. `prepare` runs once per step and makes tables of cosines and sines in the backend's form.
`rotate` runs in every layer.

R is the head size D, or less where a model rotates only the first elements of a head.

Legend: T tokens of the step, H heads, D head size, R rotated elements of a head, h = R / 2.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton

RotaryTables = tuple[torch.Tensor, torch.Tensor]  # tables of one step; only the backend that made them knows their form


class Rotary(Protocol):
    def prepare(self, angles_Th: torch.Tensor, compute_dtype: torch.dtype, scale: float = 1.0) -> RotaryTables:
        """Returns the tables for float32 angles in radians, in `compute_dtype` or float32.

        `scale`: factor of all cosines and sines.
        """

    def rotate(self, x_THD: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        """Rotates the first 2 h elements of every head of x, [T, H, D], in place and returns x.

        x may be strided over T.
        """


def choose_rotary(target: Target) -> Rotary:
    if target.backend == "reference" or uses_triton(target):
        # The Triton kernel of rotary_kv_write reads the reference's tables. With Triton, only that kernel rotates.
        from rayloom_engine.kernels.rotary.reference import ReferenceRotary

        return ReferenceRotary()
    from rayloom_engine.kernels.rotary.plain import PlainRotary

    return PlainRotary(target.device)
