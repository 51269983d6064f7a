"""Causal attention over the paged KV cache. One call may mix sequences with one new token and sequences with many.

    out[t] = softmax(scale * q[t] . K[visible]) V[visible]

With a soft cap c, a score s becomes c * tanh(s / c). The sink of a head is an additional score without a value vector.

A token at position p sees the positions (p - window, p], or [0, p] without a window.

Attention has two phases. `plan_attention` runs once per step and window. It prepares what all layers share, such as a
backend's masks, buffers or launch grids. `AttentionPlan.attend` then runs in every layer.

Legend: S sequences of the step, B blocks in a table, T tokens of the step, H query heads, K key/value heads, D head
size, N blocks in the cache, P positions in a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rayloom_engine.kernels.attention.launches import DeviceBatch
from rayloom_engine.kernels.target import Target
from rayloom_engine.kernels.triton.choice import uses_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The tokens that one step computes, and the cache blocks of each sequence.

    The tokens of a sequence are contiguous in T, and the tuples have the order of the sequences in T. Callers may put
    the sequences with one token first, as the runner does. Then the rows of these sequences are one contiguous slice.
    """

    query_lens: tuple[int, ...]  # tokens computed in this step, per sequence, each >= 1
    context_lens: tuple[int, ...]  # tokens in the cache after this step, per sequence, each >= query_len
    block_tables_SB: torch.Tensor  # int64, on the model's device, padded with 0
    slot_mapping_T: torch.Tensor  # int64, on the model's device; per token: block id * block size + offset
    # The same batch for kernels that read lengths from tensors on the device. If these tensors change later, the values
    # in the tuples are upper bounds.
    on_device: DeviceBatch | None = None


class AttentionPlan(Protocol):
    """One step's preparation for all layers that have the same window.

    Only the backend that made the plan reads its content.
    """

    def attend(
        self,
        query_THD: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention of the step's tokens, [T, H, D], contiguous, in the type of the queries.

        With a soft cap, a score s becomes soft_cap * tanh(s / soft_cap). sinks_H is float32.

        query_THD may be strided over T. `pages` is one layer's cache, [N, P, 2, K, D], which must already contain the
        keys and values of the step's own tokens. Use a plan for the layers of one model, one layer at a time, because
        the plan may reuse its buffers between calls.
        """


class PlanAttention(Protocol):
    def __call__(
        self,
        batch: AttentionBatch,
        *,
        num_heads: int,
        pages: torch.Tensor,
        window: int | None,
        compute_dtype: torch.dtype,
    ) -> AttentionPlan:
        """Returns the plan of a step for layers with `num_heads` query heads and this `window`.

        `pages` may be those of any layer: only sizes, type and device are used. `compute_dtype` is the type of the
        queries. Pages of a narrower type are widened when they are read.
        """


def choose_attention(target: Target) -> PlanAttention:
    if target.backend == "reference":
        from rayloom_engine.kernels.attention import reference

        return reference.plan_attention
    if uses_triton(target):
        from rayloom_engine.kernels.attention import triton_gpu

        return triton_gpu.plan_attention
    from rayloom_engine.kernels.attention import plain

    return plain.plan_attention


def reads_on_device(target: Target, pages: torch.Tensor) -> bool:
    """True if attention over these pages reads `AttentionBatch.on_device`. CUDA graphs work only in this case."""
    if not uses_triton(target):
        return False
    from rayloom_engine.kernels.attention import triton_gpu

    return triton_gpu.can_read(pages)


def warm_up_attention(
    target: Target,
    *,
    num_heads: int,
    pages: torch.Tensor,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Compiles the kernels that a later step may launch, so that no kernel is compiled while requests wait.

    `num_heads`: query heads of this rank. `pages`: the cache of a layer that has this soft cap and these sinks.
    """
    if reads_on_device(target, pages):
        from rayloom_engine.kernels.attention import triton_gpu

        triton_gpu.warm_up(num_heads, pages, target.compute_dtype, soft_cap=soft_cap, sinks_H=sinks_H)
