"""The gated activation in one kernel: each program computes a block of one row, in float32, and rounds once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS, early_start, wait_for_predecessor
from rayloom_engine.kernels.triton.launch import num_blocks
from rayloom_engine.kernels.triton.shipped import Shipped

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, HALF, BLOCK: tl.constexpr, STARTS_EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HALF
    wait_for_predecessor(STARTS_EARLY)
    gate = tl.load(gate_up_ptr + row * 2 * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * HALF + HALF + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * HALF + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """Implements SiluMul."""
    gate_up = gate_up_TF.contiguous()
    half = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], half))
    if out.numel():
        grid = (out.numel() // half, num_blocks(half, _BLOCK))
        silu_mul_kernel[grid](
            gate_up, out, half, BLOCK=_BLOCK, num_warps=4, num_stages=1, **early_start(gate_up.device)
        )
    return out


SHIPPED = tuple(
    Shipped(
        name=f"silu-mul-{dtype}",
        kernel=silu_mul_kernel,
        signature={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "HALF": "i32"},
        constants={"BLOCK": _BLOCK, "STARTS_EARLY": gpus == EARLY_GPUS},
        num_warps=4,
        num_stages=1,
        gpus=gpus,
    )
    for dtype in ("bf16", "fp16", "fp32")
    for gpus in (EARLY_GPUS, OTHER_GPUS)
)
