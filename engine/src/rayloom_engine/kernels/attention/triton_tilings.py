"""The tilings with which attention's kernels are compiled, and the list of the kernels that `make kernels` compiles.

A tiling is the size of the tiles and the numbers of warps and stages. It depends only on the GPU, the type, the head
size and the kind of launch. So a rank compiles few kernels, and knows all of them when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rayloom_engine.kernels.attention import triton_kernels
from rayloom_engine.kernels.attention.launches import LAUNCH_KINDS, LaunchKind
from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS
from rayloom_engine.kernels.triton.shipped import TRITON_TYPES, Gpu, Shipped

GpuFamily = Literal["ampere", "hopper", "amd"]
# Ampere has 163 KiB of shared memory for a program and multiplies from registers; hopper and later GPUs have 227 KiB,
# and multiply from shared memory.
FAMILIES: dict[GpuFamily, tuple[Gpu, ...]] = {
    "ampere": ("sm_80",),
    "hopper": ("sm_90", "sm_100"),
    "amd": ("gfx942", "gfx950"),
}
HEAD_DIMS = (64, 80, 96, 128, 256)
# Splits that `combine_kernel` adds at a time: all splits of the longest contexts, or those of a launch with few splits.
COMBINED_SPLITS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    rows: int  # (token, query head) pairs of a tile
    keys: int  # positions of a tile
    num_warps: int
    num_stages: int  # tiles of keys that are in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """The properties of a model and of its cache for which a kernel is compiled."""

    dtype_name: str  # of queries, pages and output, as PyTorch names it
    head_dim: int
    has_soft_cap: bool = False
    has_sinks: bool = False

    @property
    def padded_dim(self) -> int:
        """The next power of two, which Triton's tiles need."""
        return 1 << (self.head_dim - 1).bit_length()


def tiling(variant: AttentionVariant, kind: LaunchKind, family: GpuFamily) -> Tiling:
    """Returns the sizes of a launch. The speed of reading keys and values limits a decode, so 16 rows suffice."""
    wide = variant.padded_dim > 128
    if variant.dtype_name == "float32":
        # Exact float32 has no tensor cores on NVIDIA GPUs; small tiles keep the operands in registers.
        return Tiling(rows=16, keys=16 if wide else 32, num_warps=4, num_stages=2)
    if kind == "decode":
        return Tiling(rows=16, keys=32 if wide else 64, num_warps=4, num_stages=2 if family == "amd" else 3)
    if wide and family == "ampere":
        return Tiling(rows=32, keys=32, num_warps=8, num_stages=2)
    if wide:
        # The soft cap needs more registers, and AMD's GPUs have too few registers for the larger tile.
        keys = 16 if variant.has_soft_cap and family == "amd" else 32
        return Tiling(rows=64, keys=keys, num_warps=8, num_stages=2)
    small = family == "ampere" and variant.padded_dim == 128
    return Tiling(rows=128, keys=32 if small else 64, num_warps=8, num_stages=2)


def attend_constants(variant: AttentionVariant, kind: LaunchKind, sizes: Tiling) -> dict[str, int | bool]:
    """Returns the constants of `attend_kernel`."""
    return {
        "HEAD_DIM": variant.head_dim,
        "PADDED_DIM": variant.padded_dim,
        "ROWS": sizes.rows,
        "KEYS": sizes.keys,
        # A chunk has few tiles with a mask, and all tiles of a decode have a mask.
        "EDGE_STAGES": 1 if kind == "chunk" else sizes.num_stages,
        "CHUNKS": kind == "chunk",
        "HAS_SOFT_CAP": variant.has_soft_cap,
        "HAS_SINKS": variant.has_sinks,
    }


def combine_constants(variant: AttentionVariant, num_splits: int) -> dict[str, int]:
    """Returns the constants of `combine_kernel` for a launch with this many splits."""
    splits = next((most for most in COMBINED_SPLITS if num_splits <= most), COMBINED_SPLITS[-1])
    return {"HEAD_DIM": variant.head_dim, "PADDED_DIM": variant.padded_dim, "SPLITS": splits}


def combine_warps(constants: Mapping[str, int]) -> int:
    """Returns the number of warps with which a thread adds at most 64 elements of heads up to 256 at a time."""
    return min(8, max(4, constants["SPLITS"] * constants["PADDED_DIM"] // 1024))


def shipped_variants() -> tuple[AttentionVariant, ...]:
    """Returns the variants that `make kernels` compiles, among them all head sizes in bfloat16."""
    return (
        *(AttentionVariant(dtype_name="bfloat16", head_dim=head_dim) for head_dim in HEAD_DIMS),
        AttentionVariant(dtype_name="float16", head_dim=128),
        # The soft cap of models like Gemma 2, and the sinks of models like gpt-oss.
        AttentionVariant(dtype_name="bfloat16", head_dim=256, has_soft_cap=True),
        AttentionVariant(dtype_name="bfloat16", head_dim=64, has_sinks=True),
    )


def shipped_kernels() -> tuple[Shipped, ...]:
    """Returns each kernel of each variant, for each family of GPUs."""
    variants = shipped_variants()
    return (
        *(
            _shipped_attend(variant, kind, family)
            for variant in variants
            for kind in LAUNCH_KINDS
            for family in FAMILIES
        ),
        # `combine_kernel` is the same with and without soft caps and sinks.
        *(
            _shipped_combine(variant, num_splits, gpus)
            for variant in variants
            if not variant.has_soft_cap and not variant.has_sinks
            for num_splits in COMBINED_SPLITS
            for gpus in (EARLY_GPUS, OTHER_GPUS)
        ),
    )


def _shipped_attend(variant: AttentionVariant, kind: LaunchKind, family: GpuFamily) -> Shipped:
    sizes = tiling(variant, kind, family)
    without_sinks = {} if variant.has_sinks else {"sinks_ptr": None}
    return Shipped(
        name=_name(variant, kind),
        kernel=triton_kernels.attend_kernel,
        signature=_attend_signature(variant),
        constants={
            **without_sinks,
            **attend_constants(variant, kind, sizes),
            "STARTS_EARLY": FAMILIES[family] == EARLY_GPUS,
        },
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        gpus=FAMILIES[family],
        multiplies_matrices=True,
        copies_asynchronously=family != "amd",
    )


def _shipped_combine(variant: AttentionVariant, num_splits: int, gpus: tuple[Gpu, ...]) -> Shipped:
    constants = combine_constants(variant, num_splits)
    return Shipped(
        name=f"attention-combine-{TRITON_TYPES[variant.dtype_name]}-d{variant.head_dim}-s{num_splits}",
        kernel=triton_kernels.combine_kernel,
        signature=_combine_signature(variant),
        constants={**constants, "STARTS_EARLY": gpus == EARLY_GPUS},
        num_warps=combine_warps(constants),
        num_stages=1,
        gpus=gpus,
    )


def _name(variant: AttentionVariant, kind: LaunchKind) -> str:
    extra = f"{'-cap' if variant.has_soft_cap else ''}{'-sinks' if variant.has_sinks else ''}"
    sizes = f"{TRITON_TYPES[variant.dtype_name]}-d{variant.head_dim}"
    return f"attention-{kind}-{sizes}{extra}"


def _attend_signature(variant: AttentionVariant) -> dict[str, str]:
    element = f"*{TRITON_TYPES[variant.dtype_name]}"
    signature = {"query_ptr": element, "pages_ptr": element, "out_ptr": element}
    signature |= dict.fromkeys(("tables_ptr", "slots_ptr", "starts_ptr", "lens_ptr"), "*i32")
    signature |= dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32")
    if variant.has_sinks:
        signature["sinks_ptr"] = "*fp32"
    signature |= dict.fromkeys(("score_scale", "cap_scale"), "fp32")
    return signature | dict.fromkeys(triton_kernels.SIZES, "i32")


def _combine_signature(variant: AttentionVariant) -> dict[str, str]:
    signature = {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "starts_ptr": "*i32"}
    signature["out_ptr"] = f"*{TRITON_TYPES[variant.dtype_name]}"
    return signature | dict.fromkeys(("first_seq", "num_seqs", "num_splits"), "i32")
