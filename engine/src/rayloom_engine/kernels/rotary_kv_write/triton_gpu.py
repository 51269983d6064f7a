"""Norms, rotation and cache write in one kernel: each program handles a block of heads of one token.

torch would need ten kernels: two norms and two copies, a flip, two products, a cast, a copy and the write. The
arithmetic is in float32 and rounds once, when the result is stored. The tables are those of the reference rotation:
float32, [T, 1, R / 2] each, where the first R elements of a head are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayloom_engine.kernels.rotary import RotaryTables
from rayloom_engine.kernels.rotary_kv_write import QkNorms
from rayloom_engine.kernels.triton.early_start import EARLY_GPUS, OTHER_GPUS, early_start, wait_for_predecessor
from rayloom_engine.kernels.triton.launch import num_blocks, power_of_two
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

_HEADS = 8  # heads of a program: 4 kB of a token in bfloat16 with heads of 256


@triton.jit
def rotary_kv_write_kernel(
    qkv_ptr,
    pages_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # key/value heads
    D: tl.constexpr,
    R: tl.constexpr,  # rotated elements of a head
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,  # D / 2, rounded up to a power of two
    STARTS_EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = pair < D // 2
    inside = (head < H + 2 * K) & in_half
    is_query = head < H
    is_rotated = head < H + K
    # The elements of a pair. Elements that are not rotated form pairs, too, because all loads read pairs.
    in_rotated = pair < R // 2
    first_at = pair if R == D else tl.where(in_rotated, pair, pair + R // 2)
    second_at = pair + D // 2 if R == D else tl.where(in_rotated, pair + R // 2, pair + D // 2)
    wait_for_predecessor(STARTS_EARLY)
    elements = qkv_ptr + token * ((H + 2 * K) * D) + head * D
    first = tl.load(elements + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(elements + second_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        factor = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1)[:, None] / D + eps)
        query_first = tl.load(query_norm_ptr + first_at, mask=in_half, other=0.0).to(tl.float32)
        query_second = tl.load(query_norm_ptr + second_at, mask=in_half, other=0.0).to(tl.float32)
        key_first = tl.load(key_norm_ptr + first_at, mask=in_half, other=0.0).to(tl.float32)
        key_second = tl.load(key_norm_ptr + second_at, mask=in_half, other=0.0).to(tl.float32)
        first = tl.where(is_rotated, first * factor * tl.where(is_query, query_first, key_first), first)
        second = tl.where(is_rotated, second * factor * tl.where(is_query, query_second, key_second), second)
    cos = tl.load(cos_ptr + token * (R // 2) + pair, mask=in_rotated, other=1.0)
    sin = tl.load(sin_ptr + token * (R // 2) + pair, mask=in_rotated, other=0.0)
    new_first = tl.where(is_rotated, first * cos - second * sin, first)
    new_second = tl.where(is_rotated, second * cos + first * sin, second)

    in_dtype = qkv_ptr.dtype.element_ty
    tl.store(elements + first_at, new_first.to(in_dtype), mask=inside & is_query)
    tl.store(elements + second_at, new_second.to(in_dtype), mask=inside & is_query)
    # A token's K keys precede its K values in the pages, as they do in the projection.
    # A row that only fills up a CUDA graph has a slot below 0, and its keys and values are not written.
    slot = tl.load(slots_ptr + token)
    is_written = inside & (head >= H) & (slot >= 0)
    places = pages_ptr + slot * (2 * K * D) + (head - H) * D
    page_dtype = pages_ptr.dtype.element_ty
    # If the type of the pages is narrower than that of the projection, values are rounded twice, as by the separate
    # operations.
    tl.store(places + first_at, new_first.to(in_dtype).to(page_dtype), mask=is_written)
    tl.store(places + second_at, new_second.to(in_dtype).to(page_dtype), mask=is_written)


def rotary_kv_write(
    qkv_TXD: torch.Tensor,
    pages: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    tables: RotaryTables,
    norms: QkNorms | None,
) -> torch.Tensor:
    """Implements RotaryKvWrite."""
    num_tokens, num_heads, head_dim = qkv_TXD.shape
    num_kv_heads = pages.shape[3]
    num_queries = num_heads - 2 * num_kv_heads
    assert qkv_TXD.is_contiguous() and pages.is_contiguous() and slot_mapping_T.dtype is torch.int64
    if num_tokens:
        cos_T1h, sin_T1h = tables
        rotary_kv_write_kernel[(num_tokens, num_blocks(num_heads, _HEADS))](
            qkv_TXD,
            pages,
            slot_mapping_T,
            cos_T1h,
            sin_T1h,
            cos_T1h if norms is None else norms.query_D,
            cos_T1h if norms is None else norms.key_D,
            0.0 if norms is None else norms.eps,
            H=num_queries,
            K=num_kv_heads,
            D=head_dim,
            R=2 * cos_T1h.shape[-1],
            HAS_NORMS=norms is not None,
            HEADS=_HEADS,
            HALF_BLOCK=power_of_two(head_dim // 2),
            num_warps=_num_warps(head_dim),
            num_stages=1,
            **early_start(qkv_TXD.device),
        )
    return qkv_TXD[:, :num_queries]


def _num_warps(head_dim: int) -> int:
    """Returns the number of warps with which a thread has at most 16 elements of each half."""
    return min(8, max(1, _HEADS * power_of_two(head_dim // 2) // 512))


def _shipped(dtype: str, heads: tuple[int, int, int], has_norms: bool, gpus: tuple[Gpu, ...]) -> Shipped:
    num_queries, num_kv_heads, head_dim = heads
    norm = f"*{dtype}" if has_norms else "*fp32"
    return Shipped(
        name=f"rotary-kv-write-{'norms-' if has_norms else ''}{dtype}-h{num_queries}-k{num_kv_heads}-d{head_dim}",
        kernel=rotary_kv_write_kernel,
        signature={
            "qkv_ptr": f"*{dtype}",
            "pages_ptr": f"*{dtype}",
            "slots_ptr": "*i64",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "query_norm_ptr": norm,
            "key_norm_ptr": norm,
            "eps": "fp32",
        },
        constants={
            "H": num_queries,
            "K": num_kv_heads,
            "D": head_dim,
            "R": head_dim,
            "HAS_NORMS": has_norms,
            "HEADS": _HEADS,
            "HALF_BLOCK": power_of_two(head_dim // 2),
            "STARTS_EARLY": gpus == EARLY_GPUS,
        },
        num_warps=_num_warps(head_dim),
        num_stages=1,
        gpus=gpus,
    )


SHIPPED = tuple(
    _shipped(dtype, heads, has_norms, gpus)
    for dtype, heads, has_norms in (
        ("bf16", (9, 3, 64), False),
        ("bf16", (16, 8, 128), True),
        ("bf16", (32, 8, 128), False),
        ("bf16", (32, 8, 128), True),
        ("bf16", (32, 32, 80), False),
        ("bf16", (32, 32, 96), False),
        ("bf16", (8, 4, 256), False),
        ("fp16", (32, 8, 128), False),
        ("fp32", (9, 3, 64), False),
    )
    for gpus in (EARLY_GPUS, OTHER_GPUS)
)
