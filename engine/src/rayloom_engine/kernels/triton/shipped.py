"""Shipped: one configuration of a Triton kernel. A rank may launch it, and `make kernels` checks its machine code.

Each `kernels/<operation>/triton_gpu.py` has a tuple `SHIPPED` of such configurations. `make kernels` compiles each
configuration for its `gpus`, and checks registers, shared memory and instructions. No machine code is part of a
release. When a rank starts, it compiles the kernels that it launches, also in configurations outside of SHIPPED. This
module does not import triton, so that a list of configurations can be read without triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Gpu = Literal["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"]
GPUS: tuple[Gpu, ...] = get_args(Gpu)
NVIDIA_GPUS: tuple[Gpu, ...] = ("sm_80", "sm_90", "sm_100")
AMD_GPUS: tuple[Gpu, ...] = ("gfx942", "gfx950")

# Names of PyTorch types in signatures of Triton.
TRITON_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A kernel with everything that Triton's compiler needs. All configurations for one GPU have different names."""

    name: str  # operation, variant, type and sizes, separated by hyphens: "attention-decode-bf16-d128-p16"
    kernel: Any  # the function under @triton.jit
    signature: Mapping[str, str]  # each argument that is no constant -> "*bf16", "*i32", "i32", "fp32"
    constants: Mapping[str, int | float | bool | str | None]  # each tl.constexpr argument -> its value
    num_warps: int
    num_stages: int
    fuses_products: bool = True  # the compiler may fuse a product and a sum, which rounds once instead of twice
    gpus: tuple[Gpu, ...] = GPUS
    multiplies_matrices: bool = False  # tl.dot must become instructions of the GPU's matrix units
    reads_weights_early: bool = False  # reads weights before it waits for its predecessor (early_start.py)
    copies_asynchronously: bool = False  # on NVIDIA, loads of a loop must become asynchronous copies to shared memory
    # Pointers are aligned to 16 bytes, as torch allocates them. The arguments named here are aligned only to their
    # element's size.
    unaligned: frozenset[str] = field(default=frozenset())
