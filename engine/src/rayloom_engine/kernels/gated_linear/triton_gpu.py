"""Product and gated activation of one row: a program computes some outputs of gate and the same outputs of up.

Both products are rounded to the type of the activations before the activation, as if they had been stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rayloom_engine.kernels.linear.triton_gpu import ALIGNMENT, DEPTH, NUM_WARPS, OUTPUTS, STAGES, fits, sum_products
from rayloom_engine.kernels.silu_mul.triton_gpu import silu_mul
from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS, early_start, wait_for_predecessor
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

_OUTPUTS = OUTPUTS // 2  # a program reads as many rows of the weights as one of a product alone


@triton.jit(do_not_specialize=["sixteenth", "half"])
def gated_row_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    sixteenth,
    half,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    # The rows of a program: OUTPUTS of gate, then the same of up.
    lines = tl.arange(0, 2 * OUTPUTS)
    first = tl.program_id(0) * OUTPUTS
    rows = first + lines % OUTPUTS + (lines // OUTPUTS) * half
    wait_for_predecessor(STARTS_EARLY)
    total = sum_products(x_ptr, weight_ptr, rows, sixteenth, 2 * OUTPUTS, DEPTH, STAGES)
    pairs = tl.trans(tl.reshape(total, (2, OUTPUTS)))
    gate, up = tl.split(pairs.to(x_ptr.dtype.element_ty).to(tl.float32))
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + first + tl.arange(0, OUTPUTS), y.to(out_ptr.dtype.element_ty))


def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Implements GatedLinear. More than one row are multiplied by torch."""
    rows, inputs = weight.shape
    half = rows // 2
    if not fits(x, weight):
        return silu_mul(F.linear(x, weight))
    out = x.new_empty((*x.shape[:-1], half))
    gated_row_kernel[(half // _OUTPUTS,)](
        x,
        weight,
        out,
        inputs // ALIGNMENT,
        half,
        OUTPUTS=_OUTPUTS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
        num_stages=STAGES,
        **early_start(x.device),
    )
    return out


def _shipped(dtype: str, gpus: tuple[Gpu, ...]) -> Shipped:
    return Shipped(
        name=f"gated-linear-one-row-{dtype}",
        kernel=gated_row_kernel,
        signature={**dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}"), "sixteenth": "i32", "half": "i32"},
        constants={"OUTPUTS": _OUTPUTS, "DEPTH": DEPTH, "STAGES": STAGES, "STARTS_EARLY": gpus == EARLY_GPUS},
        num_warps=NUM_WARPS,
        num_stages=STAGES,
        gpus=gpus,
        copies_asynchronously=True,
    )


SHIPPED = tuple(_shipped(dtype, gpus) for dtype in ("bf16", "fp16", "fp32") for gpus in (EARLY_GPUS, OTHER_GPUS))
