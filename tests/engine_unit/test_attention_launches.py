"""The launches of attention on a GPU: tiles for every row, and splits that fill the GPU."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.kernels.attention.launches import DeviceBatch, LaunchKind, num_splits, plan_launches

ROWS: dict[LaunchKind, int] = {"decode": 16, "chunk": 128}


def batch_of(num_singles: int, chunk_lens: list[int], max_context_len: int = 1) -> DeviceBatch:
    nothing = torch.zeros(0, dtype=torch.int32)
    return DeviceBatch(
        tables_NB=nothing,
        slots_S=nothing,
        starts_S1=nothing,
        context_lens_S=nothing,
        num_seqs=num_singles + len(chunk_lens),
        num_singles=num_singles,
        num_chunk_tokens=sum(chunk_lens),
        max_context_len=max_context_len,
    )


def test_single_tokens_and_chunks_have_a_launch_each() -> None:
    decode, chunk = plan_launches(
        batch_of(3, [100, 7]), group=4, num_kv_heads=8, rows=ROWS, num_positions=600, num_sms=132
    )
    assert (decode.kind, decode.first_seq, decode.num_seqs, decode.num_tiles, decode.tiles_per_seq) == (
        "decode",
        0,
        3,
        3,
        1,
    )
    assert (chunk.kind, chunk.first_seq, chunk.num_seqs, chunk.num_tokens) == ("chunk", 3, 2, 107)
    assert chunk.num_tiles == 107 * 4 // 128 + 2


def test_a_large_group_has_several_tiles_for_a_token() -> None:
    (decode,) = plan_launches(batch_of(2, []), group=71, num_kv_heads=1, rows=ROWS, num_positions=1, num_sms=132)
    assert (decode.tiles_per_seq, decode.num_tiles) == (5, 10)


def test_an_empty_step_has_no_launch() -> None:
    assert plan_launches(batch_of(0, []), group=1, num_kv_heads=1, rows=ROWS, num_positions=0, num_sms=132) == ()


@given(chunk_lens=st.lists(st.integers(0, 700), min_size=1, max_size=20), group=st.integers(1, 80))
def test_every_chunk_has_tiles_for_all_of_its_rows(chunk_lens: list[int], group: int) -> None:
    """Sequence i owns the tiles from (rows of all sequences before) // ROWS + i, as in `_find_sequence`."""
    (chunk,) = plan_launches(
        batch_of(0, chunk_lens), group=group, num_kv_heads=1, rows=ROWS, num_positions=1, num_sms=1
    )
    rows = ROWS["chunk"]
    starts = list(itertools.accumulate(chunk_lens, initial=0))
    first_tiles = [start * group // rows + index for index, start in enumerate(starts)]
    assert first_tiles[-1] == chunk.num_tiles
    for length, (first, end) in zip(chunk_lens, itertools.pairwise(first_tiles), strict=True):
        assert end - first >= max(1, -(-length * group // rows))


def test_splits_fill_the_gpu_twice() -> None:
    assert num_splits(num_programs=8, num_positions=100_000, num_sms=132) == 33
    assert num_splits(num_programs=264, num_positions=100_000, num_sms=132) == 1
    assert num_splits(num_programs=8, num_positions=1_000, num_sms=132) == 3
    assert num_splits(num_programs=1, num_positions=1_000_000, num_sms=132) == 64
    assert num_splits(num_programs=0, num_positions=0, num_sms=132) == 1


@given(programs=st.integers(0, 5000), positions=st.integers(0, 1 << 20), sms=st.integers(1, 304))
def test_splits_are_neither_too_short_nor_more_than_needed(programs: int, positions: int, sms: int) -> None:
    found = num_splits(num_programs=programs, num_positions=positions, num_sms=sms)
    assert 1 <= found <= 64
    if found > 1:
        assert positions // found >= 256
        assert (found - 1) * max(1, programs) < 2 * sms
