"""Attention in torch equals its reference for odd shapes. Pages contain noise, so wrong reads change the results."""

from __future__ import annotations

import random

import pytest
import torch

from rayloom_engine.kernels.attention import AttentionBatch, plain, reference
from rayloom_engine.kernels.attention.plain import PlainPlan
from rt_tiny import make_batch

NUM_BLOCKS = 512


def plan_of(batch: AttentionBatch, pages: torch.Tensor, num_heads: int = 6, window: int | None = None) -> PlainPlan:
    return plain.plan_attention(batch, num_heads=num_heads, pages=pages, window=window, compute_dtype=torch.float32)


def attend_by_reference(
    batch: AttentionBatch, query_THD: torch.Tensor, pages: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    plan = reference.plan_attention(
        batch, num_heads=query_THD.shape[1], pages=pages, window=window, compute_dtype=torch.float32
    )
    return plan.attend(query_THD, pages, scale)


def compare(
    query_lens: list[int],
    context_lens: list[int],
    *,
    window: int | None = None,
    block_size: int = 4,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(-(-context_len // block_size))] for context_len in context_lens]
    batch = make_batch(query_lens, context_lens, tables, block_size)
    pages = torch.randn(NUM_BLOCKS, block_size, 2, num_kv_heads, head_dim)
    # As in a layer, the queries are a slice of the fused projection. So they have a stride over T.
    query_THD = torch.randn(sum(query_lens), num_heads + num_kv_heads, head_dim)[:, :num_heads]
    ours = plan_of(batch, pages, num_heads, window).attend(query_THD, pages, 0.25)
    expected = attend_by_reference(batch, query_THD, pages, window, 0.25)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [1]),
        ([1], [4]),
        ([1], [5]),
        ([1, 1, 1], [8, 8, 8]),
        ([1, 1, 1, 1], [1, 17, 9, 4]),
        ([2], [2]),
        ([13], [13]),
        ([7], [20]),
        ([4], [12]),
        ([1, 1, 5, 9], [11, 3, 5, 22]),
        ([3, 1, 2, 1], [3, 10, 19, 1]),
    ],
)
def test_plain_attention_agrees(query_lens: list[int], context_lens: list[int], window: int | None) -> None:
    compare(query_lens, context_lens, window=window)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 2), (9, 3, 64), (4, 4, 8), (8, 1, 80)])
def test_plain_attention_agrees_for_all_groupings(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    compare([1, 1, 6], [21, 2, 10], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)


def test_very_different_lengths_are_decoded_in_several_buckets() -> None:
    context_lens = [700, 3, 690, 40, 300, 1]
    batch = make_batch([1] * 6, context_lens, [list(range(-(-length // 4))) for length in context_lens])
    pages = torch.zeros(NUM_BLOCKS, 4, 2, 2, 16)
    plan = plan_of(batch, pages)
    gathered = [part.gathered.keys.shape for part in plan.decodes]
    assert [(rows, length) for rows, _, length, _ in gathered] == [(2, 700), (2, 300), (2, 4)]
    compare([1] * 6, context_lens)


def test_similar_lengths_are_decoded_as_one_slice() -> None:
    batch = make_batch([1, 1, 1], [9, 12, 10], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    plan = plan_of(batch, torch.zeros(NUM_BLOCKS, 4, 2, 2, 16))
    assert [part.rows_R for part in plan.decodes] == [slice(0, 3)]


def test_many_long_rows_of_similar_length_are_cut_into_slices() -> None:
    batch = make_batch([1] * 5, [2000] * 5, [list(range(500))] * 5)
    plan = plan_of(batch, torch.zeros(NUM_BLOCKS, 4, 2, 2, 16))
    assert [part.rows_R for part in plan.decodes] == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_a_window_gathers_only_the_blocks_that_it_shows() -> None:
    batch = make_batch([1], [100], [list(range(25))])
    plan = plan_of(batch, torch.zeros(NUM_BLOCKS, 4, 2, 2, 16), window=6)
    assert [part.gathered.block_ids.tolist() for part in plan.decodes] == [[23, 24]]


def test_table_columns_of_longer_neighbours_are_not_read() -> None:
    """A short sequence's padding (block 0) is never read as context, whatever block 0 contains."""
    batch = AttentionBatch(
        query_lens=(1, 1),
        context_lens=(2, 6),
        block_tables_SB=torch.tensor([[3, 0], [1, 2]]),
        slot_mapping_T=torch.tensor([13, 9]),
    )
    torch.manual_seed(0)
    pages, query_THD = torch.randn(5, 4, 2, 1, 8), torch.randn(2, 2, 8)
    pages[0] = float("nan")
    ours = plan_of(batch, pages, num_heads=2).attend(query_THD, pages, 1.0)
    expected = attend_by_reference(batch, query_THD, pages, None, 1.0)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_pages_narrower_than_the_arithmetic_are_widened_as_they_are_gathered(window: int | None) -> None:
    torch.manual_seed(4)
    batch = make_batch([1, 5], [9, 5], [[7, 3, 1], [2, 5]])
    narrow = torch.randn(8, 4, 2, 2, 16).to(torch.bfloat16)
    query_THD = torch.randn(6, 4, 16)

    def attend(pages: torch.Tensor) -> torch.Tensor:
        return plan_of(batch, pages, num_heads=4, window=window).attend(query_THD, pages, 0.25)

    assert attend(narrow).dtype is torch.float32
    assert torch.equal(attend(narrow), attend(narrow.float()))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_soft_caps_and_sinks_change_scores_as_in_the_reference(
    soft_cap: float | None, has_sinks: bool, window: int | None
) -> None:
    torch.manual_seed(1)
    # a whole prompt, a chunk, and two sequences with one new token
    batch = make_batch([7, 3, 1, 1], [7, 9, 6, 11], [[1, 2], [3, 4, 5], [6, 7], [8, 9, 10]])
    pages = torch.randn(16, 4, 2, 2, 16)
    query_THD = torch.randn(12, 6, 16)
    sinks_H = torch.randn(6) if has_sinks else None
    ours = plan_of(batch, pages, window=window).attend(query_THD, pages, 0.5, soft_cap=soft_cap, sinks_H=sinks_H)
    plan = reference.plan_attention(batch, num_heads=6, pages=pages, window=window, compute_dtype=torch.float32)
    expected = plan.attend(query_THD, pages, 0.5, soft_cap=soft_cap, sinks_H=sinks_H)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(ours, plan.attend(query_THD, pages, 0.5), atol=0.01)
