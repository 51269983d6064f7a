"""The product of one row of activations with a matrix, as a decode step of one sequence needs it; other rows by torch.

Such a product only reads the weights once, so the speed of the memory is its limit. A program computes OUTPUTS outputs,
and reads their weights in pieces of DEPTH inputs, several of which are in flight. Many small programs use the memory
better than the few large ones that fit the matrix units. On an H200, the four products of a layer of Llama 3.1 8B take
108 us, and 119 us by cuBLAS. For more rows such sums are mostly slower than cuBLAS.

Sums are float32, and an output is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS, early_start, wait_for_predecessor
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

OUTPUTS = 8
DEPTH = 256
NUM_WARPS = 2
STAGES = 4  # pieces of a program that are in flight
ALIGNMENT = 16  # elements: rows begin at addresses from which 16 bytes can be read at once


@triton.jit
def sum_products(
    x_ptr, weight_ptr, outputs, sixteenth, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr
):
    """Returns the sums over all inputs for these outputs, float32 [OUTPUTS]. weight [outputs, inputs]; x [inputs].

    `sixteenth`: inputs / 16. The compiler copies 16 bytes at once only if it sees that the inputs are divisible by 16.
    """
    inputs = sixteenth * 16
    depths = tl.arange(0, DEPTH)
    rows = weight_ptr + outputs.to(tl.int64)[:, None] * inputs
    total = tl.zeros((OUTPUTS, DEPTH), tl.float32)
    for start in tl.range(0, inputs, DEPTH, num_stages=STAGES):
        places = start + depths
        is_input = places < inputs
        x = tl.load(x_ptr + places, mask=is_input, other=0.0).to(tl.float32)
        weight = tl.load(rows + places[None, :], mask=is_input[None, :], other=0.0).to(tl.float32)
        total += weight * x[None, :]
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["sixteenth"])
def one_row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sixteenth,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    wait_for_predecessor(STARTS_EARLY)
    total = sum_products(x_ptr, weight_ptr, outputs, sixteenth, OUTPUTS, DEPTH, STAGES)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs).to(tl.float32)
    tl.store(out_ptr + outputs, total.to(out_ptr.dtype.element_ty))


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if the kernel can compute x [..., inputs] times weight [outputs, inputs]."""
    outputs, inputs = weight.shape
    if x.numel() != inputs or x.dtype != weight.dtype or inputs % ALIGNMENT or outputs % OUTPUTS:
        return False
    return x.is_contiguous() and weight.is_contiguous() and x.data_ptr() % 16 == 0


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Implements the product of LinearKernel."""
    if not fits(x, weight):
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], outputs))
    one_row_kernel[(outputs // OUTPUTS,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        inputs // ALIGNMENT,
        HAS_BIAS=bias is not None,
        OUTPUTS=OUTPUTS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
        num_stages=STAGES,
        **early_start(x.device),
    )
    return out


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight


KERNEL = LinearKernel(multiply=multiply, pack=_keep, description="linear by Triton for one row, else by torch")


def _shipped(dtype: str, has_bias: bool, gpus: tuple[Gpu, ...]) -> Shipped:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    return Shipped(
        name=f"linear-one-row-{dtype}{'-bias' if has_bias else ''}",
        kernel=one_row_kernel,
        signature={**pointers, "sixteenth": "i32"},
        constants={
            "HAS_BIAS": has_bias,
            "OUTPUTS": OUTPUTS,
            "DEPTH": DEPTH,
            "STAGES": STAGES,
            "STARTS_EARLY": gpus == EARLY_GPUS,
        },
        num_warps=NUM_WARPS,
        num_stages=STAGES,
        gpus=gpus,
        copies_asynchronously=True,
    )


SHIPPED = tuple(
    _shipped(dtype, has_bias, gpus)
    for dtype in ("bf16", "fp16", "fp32")
    for has_bias in (False, True)
    for gpus in (EARLY_GPUS, OTHER_GPUS)
)
