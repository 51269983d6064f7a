"""Product of activations and a dense weight matrix.

    y = x @ weight.T + bias

A backend may keep the weight in its own layout, which `pack` makes once, after the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """A backend of the product of a linear layer.

    `multiply(x, weight, bias)` returns [..., out] from x [..., in], weight [out, in] (plain or packed) and bias [out]
    or None, all in the compute type. `pack(weight)` returns the [out, in] weight in the backend's layout, or the same
    tensor if the plain layout is the fastest.
    """

    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    pack: Callable[[torch.Tensor], torch.Tensor]
    description: str  # text for the log: the backend, and the reason if it is a fallback


def choose_linear(target: Target) -> LinearKernel:
    """Returns Triton's kernel for one row on a GPU, and oneDNN with packed weights on a CPU, if they work there.

    Otherwise returns torch's linear.
    """
    if target.backend == "reference":
        from rayloom_engine.kernels.linear import reference

        return reference.KERNEL
    if uses_triton(target):
        from rayloom_engine.kernels.linear import triton_gpu

        return triton_gpu.KERNEL
    from rayloom_engine.kernels.linear import onednn, plain

    if target.backend == "plain":
        return plain.kernel("")
    problem = onednn.problem(target)
    return plain.kernel(problem) if problem else onednn.KERNEL
