"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints.

With h = D / 2 and angle a = position * frequency[i], element pairs (i, i + h) are turned by a:

    out[i] = x[i] cos(a) - x[i + h] sin(a),   out[i + h] = x[i + h] cos(a) + x[i] sin(a)
"""

from __future__ import annotations

import torch


def rotary(x_THD: torch.Tensor, cos_T11h: torch.Tensor, sin_T12h: torch.Tensor) -> torch.Tensor:
    """Rotates x, [T, H, D], in place and returns it. x may be strided over T.

    cos_T11h is [T, 1, 1, D / 2]; sin_T12h is [T, 1, 2, D / 2] and holds -sin, then sin, so that the whole rotation is
    three calls on the pair axis.
    """
    num_tokens, num_heads, head_dim = x_THD.shape
    pairs_TH2h = x_THD.view(num_tokens, num_heads, 2, head_dim // 2)
    flipped_TH2h = pairs_TH2h.flip(2)
    pairs_TH2h.mul_(cos_T11h).addcmul_(flipped_TH2h, sin_T12h)
    return x_THD
