"""The product by the C library, with weights in its packed layout and fixed sums: a row's result does not depend on the
number of rows.

A decoder on this backend calls the library itself, once per step (models/cpu_decoder.py). `multiply` is for layers that
stand alone.
"""

from __future__ import annotations

import torch

from rayloom_engine.cpu_library.library import CpuLibrary, linear_of
from rayloom_engine.kernels.linear import LinearKernel


def kernel(library: CpuLibrary) -> LinearKernel:
    """Returns the product with the library's instruction set and threads."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        rows = x.reshape(-1, x.shape[-1]).to(library.operand_dtype(weight.dtype)).contiguous()
        out = library.multiply(weight.dtype, linear_of(weight, wide_bias), rows)
        return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    return LinearKernel(multiply=multiply, pack=library.pack, description=library.description)
