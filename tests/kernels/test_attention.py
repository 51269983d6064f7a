"""Triton's attention against its reference, on ragged batches. Pages have NaN at all positions that must not be read.

The tests cover neither speed nor races between programs, because the interpreter runs one program after another.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayloom_engine.kernels.attention import AttentionBatch, reference, triton_gpu, triton_kernels
from rayloom_engine.kernels.attention.launches import DeviceBatch
from rayloom_engine.kernels.attention.triton_gpu import TritonPlan
from rayloom_engine.kernels.attention.triton_tilings import AttentionVariant, combine_constants, combine_warps
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rt_tiny import TinySequence, advance, make_cache, tiny_variant

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# Bounds of the difference from the reference, which computes sums in float32. Values are about 1, so a rounding is 2 **
# -11 in float16 and 2 ** -8 in bfloat16. Attention weights are rounded before they are multiplied with values, and the
# output is rounded again.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def make_case(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    **types: torch.dtype,
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
    """Returns a batch, its queries and its pages. The pages are NaN beyond each context and in block 0."""
    dtype = types.get("dtype", torch.float32)
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // block_size) for length in context_lens]
    ids = random.Random(0).sample(range(1, sum(counts) + 3), sum(counts))
    pages = torch.full((sum(counts) + 3, block_size, 2, num_kv_heads, head_dim), float("nan"))
    tables_SB = torch.zeros((len(counts), max(counts) + 1), dtype=torch.int64)
    for row, (count, context_len) in enumerate(zip(counts, context_lens, strict=True)):
        table = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int64)
        tables_SB[row, :count] = table
        positions = torch.arange(context_len)
        shape = (context_len, 2, num_kv_heads, head_dim)
        pages[table[positions // block_size], positions % block_size] = torch.randn(shape, generator=generator)
    # As in a layer, the queries are a slice of the fused projection. So they have a stride over T.
    fused = torch.randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    batch = AttentionBatch(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables_SB=tables_SB.to(DEVICE),
        slot_mapping_T=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
    )
    return batch, fused.to(DEVICE, dtype)[:, :num_heads], pages.to(DEVICE, dtype)


def plan_of(
    batch: AttentionBatch, query_THD: torch.Tensor, pages: torch.Tensor, window: int | None = None
) -> TritonPlan:
    return triton_gpu.plan_attention(
        batch, num_heads=query_THD.shape[1], pages=pages, window=window, compute_dtype=query_THD.dtype
    )


def expected_of(
    batch: AttentionBatch,
    query_THD: torch.Tensor,
    pages: torch.Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    plan = reference.plan_attention(
        batch, num_heads=query_THD.shape[1], pages=pages, window=window, compute_dtype=query_THD.dtype
    )
    return plan.attend(query_THD, pages, query_THD.shape[2] ** -0.5, soft_cap=soft_cap, sinks_H=sinks_H)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = BOUNDS[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=bound, rtol=0)


LENGTHS = st.lists(
    st.tuples(st.sampled_from([1, 1, 2, 5, 17]), st.sampled_from([0, 1, 15, 16, 20, 33, 50, 70])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    window=st.sampled_from([None, 1, 3, 16, 40]),
    heads=st.sampled_from([(1, 1), (6, 2), (3, 1), (4, 4)]),
    dtype=st.sampled_from([torch.float32, torch.float16] if IS_INTERPRETED else list(BOUNDS)),
    soft_cap=st.sampled_from([None, None, 2.0]),
    has_sinks=st.booleans(),
)
@example(
    lengths=[(1, 0)], window=None, heads=(1, 1), dtype=torch.float32, soft_cap=None, has_sinks=False
)  # the first token of a sequence
@example(
    lengths=[(17, 16), (17, 50)], window=None, heads=(4, 4), dtype=torch.float32, soft_cap=None, has_sinks=False
)  # a tile has rows on both sides of a border between tiles of 32 keys; float16 has tiles of 64 keys
@example(lengths=[(17, 50)], window=40, heads=(4, 4), dtype=torch.float16, soft_cap=None, has_sinks=False)
@example(
    lengths=[(5, 70), (1, 15), (17, 0)],
    window=16,
    heads=(6, 2),
    dtype=torch.float32,
    soft_cap=2.0,
    has_sinks=True,
)  # single tokens need not be first in a batch
def test_ragged_batches_agree(
    lengths: list[tuple[int, int]],
    window: int | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    query_lens = [query_len for query_len, _ in lengths]
    context_lens = [query_len + before for query_len, before in lengths]
    batch, query_THD, pages = make_case(query_lens, context_lens, heads=heads, head_dim=16, block_size=16, dtype=dtype)
    sinks_H = torch.linspace(-1.0, 3.0, heads[0], device=DEVICE) if has_sinks else None
    found = plan_of(batch, query_THD, pages, window).attend(
        query_THD, pages, query_THD.shape[2] ** -0.5, soft_cap=soft_cap, sinks_H=sinks_H
    )
    assert_near(found, expected_of(batch, query_THD, pages, window, soft_cap, sinks_H))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_each_head_size_and_block_size_agrees(head_dim: int, block_size: int) -> None:
    batch, query_THD, pages = make_case(
        [1, 3], [40, 35], heads=(4, 2), head_dim=head_dim, block_size=block_size, dtype=torch.float16
    )
    found = plan_of(batch, query_THD, pages).attend(query_THD, pages, head_dim**-0.5)
    assert_near(found, expected_of(batch, query_THD, pages))


def test_more_query_heads_than_rows_of_a_tile_are_several_tiles() -> None:
    batch, query_THD, pages = make_case([1, 1], [20, 7], heads=(40, 2), head_dim=16, block_size=16)
    plan = plan_of(batch, query_THD, pages)
    assert [(launch.tiles_per_seq, launch.num_tiles) for launch in plan.launches] == [(2, 4)]
    assert_near(plan.attend(query_THD, pages, 0.25), expected_of(batch, query_THD, pages))


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_are_split_and_short_neighbours_leave_splits_empty(window: int | None) -> None:
    batch, query_THD, pages = make_case([1, 1, 2], [900, 3, 600], heads=(2, 1), head_dim=16, block_size=16)
    plan = plan_of(batch, query_THD, pages, window)
    assert [launch.num_splits for launch in plan.launches] == [3 if window is None else 1] * 2
    sinks_H = torch.tensor([0.5, 4.0], device=DEVICE)
    plan.partial.fill_(float("nan"))  # unused splits leave their part as it is
    found = plan.attend(query_THD, pages, 0.25, sinks_H=sinks_H)
    assert_near(found, expected_of(batch, query_THD, pages, window, None, sinks_H))


@pytest.mark.parametrize("num_splits", [2, 8, 9, 33, 64, 70])
def test_splits_are_combined_by_their_weights_and_unused_splits_are_left_out(num_splits: int) -> None:
    num_tokens, num_heads, head_dim = 2, 3, 16
    generator = torch.Generator().manual_seed(num_splits)
    highest = 3.0 * torch.randn(num_tokens, num_heads, num_splits, generator=generator)
    total = torch.rand(num_tokens, num_heads, num_splits, generator=generator) + 0.5
    sums = torch.randn(num_tokens, num_heads, num_splits, head_dim, generator=generator)
    weights = torch.exp2(highest - highest.max(2, keepdim=True).values)
    # The last splits of the second token are unused.
    used = torch.ones_like(total)
    used[1, :, 1 + num_splits // 2 :] = 0.0
    expected = (sums * (weights * used)[..., None]).sum(2) / (weights * used * total).sum(2)[..., None]
    sums[used == 0] = float("nan")
    stats = torch.stack((torch.where(used > 0, highest, -1e30), total * used), dim=3).contiguous()
    out = torch.full((num_tokens, num_heads, head_dim), float("nan"), device=DEVICE)
    constants = combine_constants(AttentionVariant(dtype_name="float32", head_dim=head_dim), num_splits)
    assert constants["SPLITS"] == (8 if num_splits <= 8 else 64)
    triton_kernels.combine_kernel[(num_tokens + 1, num_heads)](
        sums.to(DEVICE),
        stats.to(DEVICE),
        torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE),
        out,
        0,
        2,
        num_splits,
        **constants,
        STARTS_EARLY=False,
        num_warps=combine_warps(constants),
        num_stages=1,
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_plan_serves_longer_contexts_and_other_slots_from_the_same_tensors() -> None:
    """As in the replay of a CUDA graph, only the content of the tensors changes, and padding has no tokens."""
    batch, query_THD, pages = make_case([1, 1], [530, 40], heads=(2, 1), head_dim=16, block_size=16)
    width = batch.block_tables_SB.shape[1]
    tables_NB = torch.full((7, width), 1 << 20, dtype=torch.int32, device=DEVICE)  # no block has such an id
    tables_NB[5], tables_NB[2] = batch.block_tables_SB.to(torch.int32)
    device_batch = DeviceBatch(
        tables_NB=tables_NB,
        slots_S=torch.zeros(4, dtype=torch.int32, device=DEVICE),
        starts_S1=torch.zeros(5, dtype=torch.int32, device=DEVICE),
        context_lens_S=torch.zeros(4, dtype=torch.int32, device=DEVICE),
        num_seqs=4,
        num_singles=4,
        num_chunk_tokens=0,
        max_context_len=1024,
    )
    plan = triton_gpu.plan_on_device(device_batch, num_heads=2, pages=pages, window=None, compute_dtype=torch.float32)
    assert [launch.num_splits for launch in plan.launches] == [2 if IS_INTERPRETED else 4]
    padded_THD = torch.cat((query_THD, query_THD))
    for context_lens in ((3, 40), (529, 1), (530, 39)):
        device_batch.slots_S[:2] = torch.tensor([5, 2])
        device_batch.starts_S1[:] = torch.tensor([0, 1, 2, 2, 2])
        device_batch.context_lens_S[:2] = torch.tensor(context_lens)
        found = plan.attend(padded_THD, pages, 0.25)[:2]
        assert_near(found, expected_of(replace(batch, context_lens=context_lens), query_THD, pages))


def test_empty_sequences_among_others_are_skipped() -> None:
    batch, query_THD, pages = make_case([2, 1, 3], [20, 9, 3], heads=(2, 1), head_dim=16, block_size=16)
    device_batch = DeviceBatch(
        tables_NB=batch.block_tables_SB.to(torch.int32),
        slots_S=torch.tensor([1, 0, 0, 1, 2, 2], dtype=torch.int32, device=DEVICE),
        starts_S1=torch.tensor([0, 0, 2, 2, 3, 6, 6], dtype=torch.int32, device=DEVICE),
        context_lens_S=torch.tensor([0, 20, 0, 9, 3, 0], dtype=torch.int32, device=DEVICE),
        num_seqs=6,
        num_singles=0,
        num_chunk_tokens=6,
        max_context_len=20,
    )
    plan = triton_gpu.plan_on_device(device_batch, num_heads=2, pages=pages, window=None, compute_dtype=torch.float32)
    assert_near(plan.attend(query_THD, pages, 0.25), expected_of(batch, query_THD, pages))


def test_blocks_that_left_the_window_are_not_read() -> None:
    """The window begins at position 82, in the second block of a tile of 32 keys."""
    batch, query_THD, pages = make_case([1, 4], [85, 88], heads=(2, 1), head_dim=16, block_size=16)
    expected = expected_of(batch, query_THD, pages, 3)
    freed = batch.block_tables_SB.clone()
    freed[:, :5] = 0  # block 0 is full of NaN
    found = plan_of(replace(batch, block_tables_SB=freed), query_THD, pages, 3).attend(query_THD, pages, 0.25)
    assert_near(found, expected)


@pytest.mark.parametrize(("head_dim", "block_size"), [(72, 16), (64, 24)])
def test_sizes_that_the_kernels_cannot_read_are_computed_by_torch(head_dim: int, block_size: int) -> None:
    batch, query_THD, pages = make_case([1], [2], heads=(2, 1), head_dim=head_dim, block_size=block_size)
    pages = pages.nan_to_num()  # torch's attention gathers whole blocks
    plan = plan_of(batch, query_THD, pages)
    assert not isinstance(plan, triton_gpu.TritonPlan)
    assert_near(plan.attend(query_THD, pages, head_dim**-0.5), expected_of(batch, query_THD, pages))


def test_queries_of_any_stride_are_read() -> None:
    batch, query_THD, pages = make_case([1, 2], [4, 5], heads=(2, 1), head_dim=16, block_size=16)
    transposed_THD = query_THD.transpose(1, 2).contiguous().transpose(1, 2)
    found = plan_of(batch, query_THD, pages).attend(transposed_THD, pages, 0.25)
    assert_near(found, expected_of(batch, query_THD, pages))


def logits_of(model: RankModel) -> torch.Tensor:
    sequence = TinySequence([11, 48, 200, 3, 77, 5, 130, 9, 61, 250, 17], block_table=[3, 1, 6])
    cache = make_cache(model.shape)
    return torch.cat([advance(model, cache, [(sequence, count)])[0] for count in (6, 4, 1)])


@pytest.mark.skipif(not IS_INTERPRETED, reason="the small models of tests compute on a CPU")
def test_a_model_computes_the_same_logits(tmp_path: Path) -> None:
    """A prompt in two chunks, then single tokens, with a window. All other operations are torch's."""
    shape = read_shape(tiny_variant(tmp_path, "mistral-window"))
    plain = choose_kernels(Target(device=DEVICE, compute_dtype=torch.float32, backend="plain"))
    ours = replace(plain, plan_attention=triton_gpu.plan_attention)
    found, expected = (
        logits_of(load_model(tmp_path, shape, kernels, dtype=torch.float32).model) for kernels in (ours, plain)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
