"""Attention by Triton: plans and launches. `triton_kernels.py` has the kernels, `triton_tilings.py` their sizes.

A plan has at most two launches: one for the sequences at the front of the batch that have one token each, and one for
the other sequences. A launch reads lengths, slots and block tables from tensors on the device. The grid and the number
of splits depend only on bounds that the host knows, so a CUDA graph can replay a launch while the contexts grow.

Legend: T tokens of the step, S sequences, N slots, B blocks of a table, H query heads, K key/value heads, D head size,
P positions of a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from rayloom_engine.kernels.attention import AttentionBatch, AttentionPlan, plain, triton_kernels
from rayloom_engine.kernels.attention.launches import LAUNCH_KINDS, DeviceBatch, Launch, plan_launches
from rayloom_engine.kernels.attention.triton_tilings import (
    AttentionVariant,
    GpuFamily,
    attend_constants,
    combine_constants,
    combine_warps,
    shipped_kernels,
    tiling,
)
from rayloom_engine.kernels.triton.early_start import early_start
from rayloom_engine.kernels.triton.shipped import Shipped

SHIPPED: tuple[Shipped, ...] = shipped_kernels()

_LOG2_E = math.log2(math.e)
_NO_WINDOW = 1 << 30  # longer than any context
_FEW_AND_MANY_POSITIONS = (1 << 10, 1 << 16)  # with these, a launch has few splits, and as many as it can have
_SMS_OF_INTERPRETER = 4  # assumed number of multiprocessors for the interpreter, which computes on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    score_scale: float  # factor of q . k by which a score becomes an exponent of 2
    cap_scale: float
    sinks_H: torch.Tensor | None

    @classmethod
    def of(cls, scale: float, soft_cap: float | None, sinks_H: torch.Tensor | None) -> _Scores:
        if soft_cap is None:
            return cls(score_scale=scale * _LOG2_E, cap_scale=0.0, sinks_H=sinks_H)
        # cap * tanh(x) = cap * (1 - 2 / (1 + exp(2 * x))), with x = score / cap.
        return cls(score_scale=2.0 * scale * _LOG2_E / soft_cap, cap_scale=soft_cap * _LOG2_E, sinks_H=sinks_H)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """Implements AttentionPlan. Every call of `attend` overwrites the plan's buffers, which hold partial results."""

    batch: DeviceBatch
    launches: tuple[Launch, ...]
    window: int | None
    partial: torch.Tensor  # float32, for [T, H, splits, D]: the sums of each split; unused if there is one split
    stats: torch.Tensor  # float32, for [T, H, splits, 2]

    def attend(
        self,
        query_THD: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention, [T, H, D]. The rows of tokens that belong to no sequence are uninitialised.

        `soft_cap` and `sinks_H` (float32) as in the reference.
        """
        num_tokens, num_heads, head_dim = query_THD.shape
        out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=query_THD.dtype, device=query_THD.device)
        query_THD = _aligned(query_THD)
        variant = AttentionVariant(
            dtype_name=_name(query_THD.dtype),
            head_dim=head_dim,
            has_soft_cap=soft_cap is not None,
            has_sinks=sinks_H is not None,
        )
        scores = _Scores.of(scale, soft_cap, sinks_H)
        for launch in self.launches:
            self._attend(launch, variant, query_THD, pages, out_THD, scores)
            if launch.num_splits > 1:
                self._combine(launch, variant, out_THD)
        return out_THD

    def _attend(
        self,
        launch: Launch,
        variant: AttentionVariant,
        query_THD: torch.Tensor,
        pages: torch.Tensor,
        out_THD: torch.Tensor,
        scores: _Scores,
    ) -> None:
        batch = self.batch
        num_kv_heads = pages.shape[3]
        sizes = tiling(variant, launch.kind, _family(pages.device))
        grid = (launch.num_tiles, num_kv_heads, launch.num_splits)
        triton_kernels.attend_kernel[grid](
            query_THD,
            pages,
            batch.tables_NB,
            batch.slots_S,
            batch.starts_S1,
            batch.context_lens_S,
            scores.sinks_H,
            out_THD,
            self.partial,
            self.stats,
            scores.score_scale,
            scores.cap_scale,
            launch.first_seq,
            launch.num_seqs,
            launch.tiles_per_seq,
            batch.tables_NB.stride(0),
            query_THD.stride(0),
            num_kv_heads,
            query_THD.shape[1] // num_kv_heads,
            _NO_WINDOW if self.window is None else self.window,
            launch.num_splits,
            pages.shape[1].bit_length() - 1,
            **attend_constants(variant, launch.kind, sizes),
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            **early_start(pages.device),
        )

    def _combine(self, launch: Launch, variant: AttentionVariant, out_THD: torch.Tensor) -> None:
        constants = combine_constants(variant, launch.num_splits)
        triton_kernels.combine_kernel[(launch.num_tokens, out_THD.shape[1])](
            self.partial,
            self.stats,
            self.batch.starts_S1,
            out_THD,
            launch.first_seq,
            launch.num_seqs,
            launch.num_splits,
            **constants,
            num_warps=combine_warps(constants),
            num_stages=1,
            **early_start(out_THD.device),
        )


def can_read(pages: torch.Tensor) -> bool:
    """True if the kernels work with this head size and block size."""
    _, block_size, _, _, head_dim = pages.shape
    return head_dim % 16 == 0 and block_size & (block_size - 1) == 0


def plan_attention(
    batch: AttentionBatch,
    *,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    compute_dtype: torch.dtype,
) -> AttentionPlan:
    """Implements PlanAttention. Copies the lengths to the device, and does not wait for computations there.

    Returns a plan of torch's attention if the kernels cannot read the pages.
    """
    if not can_read(pages):
        return plain.plan_attention(batch, num_heads=num_heads, pages=pages, window=window, compute_dtype=compute_dtype)
    if batch.on_device is not None:
        return plan_on_device(
            batch.on_device, num_heads=num_heads, pages=pages, window=window, compute_dtype=compute_dtype
        )
    query_lens = batch.query_lens
    num_seqs = len(query_lens)
    num_singles = next((index for index, length in enumerate(query_lens) if length > 1), num_seqs)
    # One copy brings all three tensors to the device. A row's length is a multiple of 4 int32, so all rows are aligned
    # to 16 bytes.
    rows = torch.zeros((3, -(-(num_seqs + 1) // 4) * 4), dtype=torch.int32)
    rows[0, 1 : num_seqs + 1] = torch.tensor(list(itertools.accumulate(query_lens)), dtype=torch.int32)
    rows[1] = torch.arange(rows.shape[1])
    rows[2, :num_seqs] = torch.tensor(batch.context_lens, dtype=torch.int32)
    starts_S1, slots_S, context_lens_S = rows.to(pages.device)
    device_batch = DeviceBatch(
        tables_NB=batch.block_tables_SB.to(torch.int32).contiguous(),
        slots_S=slots_S,
        starts_S1=starts_S1,
        context_lens_S=context_lens_S,
        num_seqs=num_seqs,
        num_singles=num_singles,
        num_chunk_tokens=sum(query_lens[num_singles:]),
        max_context_len=max(batch.context_lens, default=0),
    )
    return plan_on_device(device_batch, num_heads=num_heads, pages=pages, window=window, compute_dtype=compute_dtype)


def plan_on_device(
    batch: DeviceBatch,
    *,
    num_heads: int,
    pages: torch.Tensor,
    window: int | None,
    compute_dtype: torch.dtype,
) -> TritonPlan:
    """Returns a plan that depends on the host's bounds alone, not on the content of the tensors.

    Raises ValueError for a head size or block size that the kernels cannot read.
    """
    _, block_size, _, num_kv_heads, head_dim = pages.shape
    if not can_read(pages):
        raise ValueError(
            f"attention in Triton has head size {head_dim} and block size {block_size}; it needs a head size that is "
            "divisible by 16, and a power of two as block size"
        )
    variant = AttentionVariant(dtype_name=_name(compute_dtype), head_dim=head_dim)
    launches = plan_launches(
        batch,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        rows={kind: tiling(variant, kind, _family(pages.device)).rows for kind in LAUNCH_KINDS},
        num_positions=batch.max_context_len if window is None else min(window, batch.max_context_len),
        num_sms=_num_sms(pages.device),
    )
    # The device computes one launch after the other, so the launches share the buffers.
    num_tokens = batch.num_singles + batch.num_chunk_tokens
    num_parts = max((num_tokens * num_heads * each.num_splits for each in launches if each.num_splits > 1), default=0)
    return TritonPlan(
        batch=batch,
        launches=launches,
        window=window,
        partial=torch.empty(num_parts * head_dim, dtype=torch.float32, device=pages.device),
        stats=torch.empty(num_parts * 2, dtype=torch.float32, device=pages.device),
    )


def warm_up(
    num_heads: int,
    pages: torch.Tensor,
    compute_dtype: torch.dtype,
    *,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compiles the kernels that a plan for such pages launches, by launching each kernel on a few tokens.

    Layers with a soft cap or with sinks have kernels of their own. Reads block 0 of the pages, and writes nothing
    there.
    """
    device = pages.device
    query_THD = torch.zeros((3, num_heads, pages.shape[4]), dtype=compute_dtype, device=device)
    for max_context_len in _FEW_AND_MANY_POSITIONS:
        batch = DeviceBatch(
            tables_NB=torch.zeros((1, 1), dtype=torch.int32, device=device),
            slots_S=torch.zeros(2, dtype=torch.int32, device=device),
            starts_S1=torch.tensor([0, 1, 3], dtype=torch.int32, device=device),
            context_lens_S=torch.tensor([1, 2], dtype=torch.int32, device=device),
            num_seqs=2,
            num_singles=1,
            num_chunk_tokens=2,
            max_context_len=max_context_len,
        )
        plan = plan_on_device(batch, num_heads=num_heads, pages=pages, window=None, compute_dtype=compute_dtype)
        plan.attend(query_THD, pages, 1.0, soft_cap=soft_cap, sinks_H=sinks_H)


def _aligned(query_THD: torch.Tensor) -> torch.Tensor:
    """Returns the queries with strides that the kernel can read; a slice of the fused projection needs no copy."""
    num_heads, head_dim = query_THD.shape[1:]
    is_dense = query_THD.stride()[1:] == (head_dim, 1) and query_THD.stride(0) >= num_heads * head_dim
    if is_dense and query_THD.stride(0) % 16 == 0 and query_THD.data_ptr() % 16 == 0:
        return query_THD
    return torch.empty_like(query_THD, memory_format=torch.contiguous_format).copy_(query_THD)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _family(device: torch.device) -> GpuFamily:
    if torch.version.hip is not None:
        return "amd"
    if device.type == "cpu":  # the interpreter
        return "hopper"
    return "hopper" if torch.cuda.get_device_capability(device) >= (9, 0) else "ampere"


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type == "cpu":
        return _SMS_OF_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count
