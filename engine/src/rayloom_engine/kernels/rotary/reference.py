"""Rotation in float32, as the formula is written."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.rotary import RotaryTables


class ReferenceRotary:
    """Implements Rotary. Its tables are cos and sin, [T, 1, h] each, in float32."""

    def prepare(self, angles_Th: torch.Tensor, compute_dtype: torch.dtype, scale: float = 1.0) -> RotaryTables:
        return angles_Th.cos()[:, None, :] * scale, angles_Th.sin()[:, None, :] * scale

    def rotate(self, x_THD: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        cos, sin = tables
        rotated_THR = x_THD[..., : 2 * cos.shape[-1]]
        first, second = rotated_THR.float().chunk(2, dim=-1)
        rotated_THR.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        return x_THD
