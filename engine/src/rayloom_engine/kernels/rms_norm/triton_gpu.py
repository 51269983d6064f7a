"""RMS normalisation with the residual addition before it, in one kernel: a program for each row.

The kernel reads and writes each element once. torch needs a kernel for the addition and one for the norm. As in the
reference, the sum with the residual is rounded to the residual's type before it is normalised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS, early_start, wait_for_predecessor
from rayloom_engine.kernels.triton.launch import power_of_two
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    D,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(STARTS_EARLY)
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + start + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(out_ptr + start + columns, (weight * x * factor).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x_D: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_D: torch.Tensor | None = None
) -> torch.Tensor:
    """Implements RmsNorm. The residual is contiguous."""
    x = x_D.contiguous()
    out_D = torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        assert residual_D is None or residual_D.is_contiguous()
        block = power_of_two(size)
        rms_norm_kernel[(x.numel() // size,)](
            x,
            x if residual_D is None else residual_D,
            weight_D,
            out_D,
            size,
            eps,
            HAS_RESIDUAL=residual_D is not None,
            BLOCK=block,
            num_warps=_num_warps(block),
            num_stages=1,
            **early_start(x.device),
        )
    return out_D


def _num_warps(block: int) -> int:
    """Returns the number of warps, from 1 to 16, with which a thread has 16 elements of a row if possible."""
    return min(16, max(1, block // 512))


def _shipped(dtype: str, size: int, has_residual: bool, gpus: tuple[Gpu, ...]) -> Shipped:
    block = power_of_two(size)
    return Shipped(
        name=f"rms-norm-{'add-' if has_residual else ''}{dtype}-d{size}",
        kernel=rms_norm_kernel,
        signature={
            "x_ptr": f"*{dtype}",
            "residual_ptr": f"*{dtype}",
            "weight_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "D": "i32",
            "eps": "fp32",
        },
        constants={"HAS_RESIDUAL": has_residual, "BLOCK": block, "STARTS_EARLY": gpus == EARLY_GPUS},
        num_warps=_num_warps(block),
        num_stages=1,
        gpus=gpus,
        reads_weights_early=True,
    )


SHIPPED = tuple(
    _shipped(dtype, size, has_residual, gpus)
    for dtype, size in (("bf16", 576), ("bf16", 4096), ("bf16", 8192), ("fp16", 4096), ("fp32", 576))
    for has_residual in (False, True)
    for gpus in (EARLY_GPUS, OTHER_GPUS)
)
