"""The product by torch's own linear, with weights in their plain layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rayloom_engine.kernels.linear import LinearKernel


def kernel(reason: str) -> LinearKernel:
    """Returns torch's linear. `reason` says why it is used as a fallback; empty if it is the first choice."""
    description = f"linear by torch ({reason})" if reason else "linear by torch"
    return LinearKernel(multiply=F.linear, pack=_keep, description=description)


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight
