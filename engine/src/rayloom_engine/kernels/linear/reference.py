"""The product in float64, rounded to the type of the activations."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.linear import LinearKernel


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    return product.to(x.dtype)


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight


KERNEL = LinearKernel(multiply=_multiply, pack=_keep, description="linear in float64")
