"""Rotation of all heads in three torch calls, by viewing the head as an axis of pairs."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.rotary import RotaryTables


class PlainRotary:
    """Implements Rotary. Its tables are cos, [T, 1, 1, h], and -sin followed by sin, [T, 1, 2, h]."""

    __slots__ = ("_signs_21",)

    def __init__(self, device: torch.device) -> None:
        self._signs_21 = torch.tensor([[-1.0], [1.0]], device=device)

    def prepare(self, angles_Th: torch.Tensor, compute_dtype: torch.dtype, scale: float = 1.0) -> RotaryTables:
        angles_T11h = angles_Th[:, None, None, :]
        sin_T12h = angles_T11h.sin() * self._signs_21
        cos_T11h = angles_T11h.cos()
        if scale != 1.0:
            sin_T12h.mul_(scale)
            cos_T11h.mul_(scale)
        return cos_T11h.to(compute_dtype), sin_T12h.to(compute_dtype)

    def rotate(self, x_THD: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
        cos_T11h, sin_T12h = tables
        half = cos_T11h.shape[-1]
        pairs_TH2h = x_THD[..., : 2 * half].view(*x_THD.shape[:-1], 2, half)
        flipped_TH2h = pairs_TH2h.flip(2)
        pairs_TH2h.mul_(cos_T11h).addcmul_(flipped_TH2h, sin_T12h)
        return x_THD
