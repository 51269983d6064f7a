"""Triton kernels under test: their device, the data types that work there, and the comparison with a reference."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.target import Backend, Target
from rayloom_engine.kernels.triton.choice import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
# Half of the relative distance between neighbouring numbers. A result that is rounded once may differ by this, and
# additionally by the rounding of earlier float32 arithmetic.
EPSILON = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# All types work in the interpreter, too. The interpreter computes bfloat16 in float32, except in matrix products. No
# kernel that uses DTYPES has matrix products.
DTYPES = tuple(EPSILON)


def target(backend: Backend, dtype: torch.dtype = torch.float32) -> Target:
    return Target(device=DEVICE, compute_dtype=dtype, backend=backend)


def randn(*sizes: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, equal for equal seeds on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(sizes, generator=generator)).to(dtype).to(DEVICE)


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, steps: float, scale: float = 1.0) -> None:
    """Fails if numbers of about `scale` differ by more than `steps` roundings of their type.

    The expected values may have a wider type.
    """
    bound = steps * EPSILON[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound * scale)
