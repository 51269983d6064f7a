"""The Triton kernels of attention: one for chunks and decodes, and one that combines the splits of a context.

A program of `attend_kernel` computes one tile: neighbouring rows of one sequence and one key/value head, over one split
of the context. A sequence has a row for each pair of a token and a query head of the key/value head, token by token.
So all query heads that share keys are in one tile, whatever their number. Scores, softmax and sums are float32. The
softmax is computed online in powers of 2: a row keeps its highest score so far and the sum of 2 ** (score - highest).

Keys and values are read from the pages through the block table, a tile of neighbouring positions at a time. No mask or
copy in memory grows with the context.

Legend: T tokens of the step, S sequences, N slots, B blocks of a table, H query heads, K key/value heads, D head size,
P positions of a block, 2 ** block_shift.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayloom_engine.kernels.triton.early_start import wait_for_predecessor

# The score before the first key. It is finite, because -inf - (-inf) is NaN.
_LOWEST = tl.constexpr(-1.0e30)

# A split reads at least this many positions. The number of splits is chosen for the longest context of a launch. A
# short context leaves some splits unused, because an almost empty split costs more to combine than to compute.
_LEAST_POSITIONS = tl.constexpr(64)

# Triton does not specialise these integers. Otherwise it would compile another kernel for the value 1, and another one
# for values that are divisible by 16.
SIZES = [
    "first_seq",
    "num_seqs",
    "tiles_per_seq",
    "table_stride",
    "query_stride",
    "num_kv_heads",
    "group",
    "window",
    "num_splits",
    "block_shift",
]


@triton.jit
def _find_sequence(starts_ptr, first_seq, num_seqs, tile, group, ROWS: tl.constexpr):
    """Returns (sequence, index of the tile in the sequence) of a tile.

    The tiles of sequence i begin at (rows of sequences 0 to i - 1) // ROWS + i. So each sequence has enough tiles, and
    an empty sequence has one tile.
    """
    first_token = tl.load(starts_ptr + first_seq)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + first_seq + middle) - first_token
        if before * group // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(starts_ptr + first_seq + low) - first_token
    return first_seq + low, tile - (before * group // ROWS + low)


@triton.jit
def _attend_tile(
    query, total_out, highest, total, pages_ptr, table_ptr, key_tile, head_offset, kv_width, first_key, last_position,
    row_positions, window, score_scale, cap_scale, block_shift,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Returns (total_out, highest, total) after another tile. MASKED: some row may not see all keys of the tile."""
    positions = key_tile * KEYS + tl.arange(0, KEYS)
    dims = tl.arange(0, PADDED_DIM)
    # Positions that no row sees are not read: the table may have no block for them, and the page may hold any values.
    is_read = (positions >= first_key) & (positions <= last_position)
    is_dim = dims < HEAD_DIM
    if MASKED:
        blocks = tl.load(table_ptr + (positions >> block_shift), mask=is_read, other=0)
    else:
        blocks = tl.load(table_ptr + (positions >> block_shift))
    # The cache may have more than 2 ** 31 elements.
    offsets = positions & ((1 << block_shift) - 1)
    places = ((blocks.to(tl.int64) << block_shift) + offsets) * (2 * kv_width) + head_offset
    key_ptrs = pages_ptr + places[None, :] + dims[:, None]
    value_ptrs = pages_ptr + (places + kv_width)[:, None] + dims[None, :]
    if MASKED and HEAD_DIM == PADDED_DIM:
        key = tl.load(key_ptrs, mask=is_read[None, :], other=0.0)
        value = tl.load(value_ptrs, mask=is_read[:, None], other=0.0)
    elif MASKED:
        key = tl.load(key_ptrs, mask=is_read[None, :] & is_dim[:, None], other=0.0)
        value = tl.load(value_ptrs, mask=is_read[:, None] & is_dim[None, :], other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        key = tl.load(key_ptrs)
        value = tl.load(value_ptrs)
    else:
        key = tl.load(key_ptrs, mask=is_dim[:, None], other=0.0)
        value = tl.load(value_ptrs, mask=is_dim[None, :], other=0.0)
    scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * score_scale
    if HAS_SOFT_CAP:
        # This is log2(e) * cap * tanh(score / cap): score_scale and cap_scale include all constant factors.
        scores = cap_scale * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    if MASKED:
        visible = (positions[None, :] <= row_positions[:, None]) & (
            positions[None, :] > row_positions[:, None] - window
        )
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    total_out = total_out * shrink[:, None]
    total_out = tl.dot(weights.to(query.dtype), value.to(query.dtype), total_out, input_precision="ieee")
    return total_out, new_highest, total


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    query_ptr, pages_ptr, tables_ptr, slots_ptr, starts_ptr, lens_ptr, sinks_ptr, out_ptr, partial_ptr, stats_ptr,
    score_scale, cap_scale, first_seq, num_seqs, tiles_per_seq, table_stride, query_stride, num_kv_heads, group, window,
    num_splits, block_shift,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE_STAGES: tl.constexpr,
    CHUNKS: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Computes the attention of the sequences [first_seq, first_seq + num_seqs); grid (tiles, K, splits).

    query [T, H, D] with `query_stride` elements from token to token, divisible by 16; pages [N, P, 2, K, D]; tables
    int32 [slots, B] with rows of `table_stride`; slots int32 [S]; starts int32 [S + 1], the first token of each
    sequence in T; lens int32 [S], the context lengths; sinks float32 [H] or None; out [T, H, D]. With several splits,
    the program writes partial float32 [T, H, splits, D] and stats float32 [T, H, splits, 2] (highest score, sum), and
    `combine_kernel` writes `out`. An unused split writes only stats, with a sum of 0. A row without visible keys
    becomes zeros.

    CHUNKS: sequences have any number of tokens, so a program searches for its sequence. The program masks a tile of
    keys only if some row does not see all of the tile's keys. Without CHUNKS, each sequence has `tiles_per_seq` tiles,
    enough for its tokens. EDGE_STAGES: the number of tiles of keys in flight in the loop over masked tiles.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    wait_for_predecessor(STARTS_EARLY)
    if CHUNKS:
        # Later rows see more keys. Their tiles start first, so that no long tile is left at the end.
        tile = tl.num_programs(0) - 1 - tile
        seq, tile = _find_sequence(starts_ptr, first_seq, num_seqs, tile, group, ROWS)
    else:
        seq = first_seq + tile // tiles_per_seq
        tile = tile % tiles_per_seq
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    first_row = tile * ROWS
    num_rows = query_len * group
    if first_row >= num_rows:
        return
    context_len = tl.load(lens_ptr + seq)
    table_ptr = tables_ptr + tl.load(slots_ptr + seq).to(tl.int64) * table_stride

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    is_row = rows < num_rows
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = start + rows // group
    heads = kv_head * group + rows % group
    query_offsets = tokens.to(tl.int64) * tl.multiple_of(query_stride, 16) + heads * HEAD_DIM
    query = tl.load(query_ptr + query_offsets[:, None] + dims[None, :], mask=is_element, other=0.0)

    # Positions of the rows, and the tiles of keys that at least one row sees: [first_tile, end_tile).
    before = context_len - query_len
    row_positions = before + rows // group
    first_position = before + first_row // group
    last_position = before + (tl.minimum(first_row + ROWS, num_rows) - 1) // group
    first_key = tl.maximum(first_position - window + 1, 0)
    first_tile = first_key // KEYS
    end_tile = tl.cdiv(last_position + 1, KEYS)
    num_used = tl.minimum(num_splits, tl.maximum(1, (end_tile - first_tile) * KEYS // _LEAST_POSITIONS))
    row_ids = tokens.to(tl.int64) * (num_kv_heads * group) + heads  # index in [T, H]
    part_ids = row_ids * num_splits + split
    if split >= num_used:
        tl.store(stats_ptr + part_ids * 2, tl.full((ROWS,), _LOWEST, tl.float32), mask=is_row)
        tl.store(stats_ptr + part_ids * 2 + 1, tl.zeros((ROWS,), tl.float32), mask=is_row)
        return
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_used)
    first_tile += split * tiles_per_split
    end_tile = tl.minimum(end_tile, first_tile + tiles_per_split)

    total_out = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), _LOWEST, tl.float32)
    if HAS_SINKS:
        # A sink is an additional score without a value vector. Only one split may add the sink. Like the scores, the
        # sink is multiplied by log2(e).
        if split == 0:
            highest = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * 1.4426950408889634
            total += 1.0

    kv_width = num_kv_heads * HEAD_DIM
    head_offset = kv_head * HEAD_DIM
    full_begin = first_tile
    full_end = first_tile
    if CHUNKS:
        # All rows see all keys of the tiles [full_begin, full_end).
        full_end = tl.maximum(first_tile, tl.minimum((first_position + 1) // KEYS, end_tile))
        full_begin = tl.maximum(first_tile, tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS))
        full_begin = tl.minimum(full_begin, full_end)
        for key_tile in tl.range(full_begin, full_end):
            total_out, highest, total = _attend_tile(
                query, total_out, highest, total, pages_ptr, table_ptr, key_tile, head_offset, kv_width,
                first_key, last_position, row_positions, window, score_scale, cap_scale, block_shift,
                HEAD_DIM, PADDED_DIM, KEYS, False, HAS_SOFT_CAP,
            )  # fmt: skip
    for edge in tl.range(first_tile, end_tile - (full_end - full_begin), num_stages=EDGE_STAGES):
        key_tile = tl.where(edge < full_begin, edge, edge + full_end - full_begin)
        total_out, highest, total = _attend_tile(
            query, total_out, highest, total, pages_ptr, table_ptr, key_tile, head_offset, kv_width,
            first_key, last_position, row_positions, window, score_scale, cap_scale, block_shift,
            HEAD_DIM, PADDED_DIM, KEYS, True, HAS_SOFT_CAP,
        )  # fmt: skip

    if num_splits == 1:
        out = total_out / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = out_ptr + row_ids[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_element)
    else:
        tl.store(partial_ptr + part_ids[:, None] * HEAD_DIM + dims[None, :], total_out, mask=is_element)
        tl.store(stats_ptr + part_ids * 2, highest, mask=is_row)
        tl.store(stats_ptr + part_ids * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_splits"])
def combine_kernel(
    partial_ptr, stats_ptr, starts_ptr, out_ptr, first_seq, num_seqs, num_splits,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Combines the splits of the sequences, and writes the sequences' rows of out [T, H, D]; grid (tokens, H).

    If the grid has more tokens than the sequences, the programs of the other tokens write nothing.
    """
    wait_for_predecessor(STARTS_EARLY)
    token = tl.load(starts_ptr + first_seq) + tl.program_id(0)
    if token >= tl.load(starts_ptr + first_seq + num_seqs):
        return
    row_id = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    total_out = tl.zeros((PADDED_DIM,), tl.float32)
    total = 0.0
    highest = _LOWEST
    for begin in range(0, num_splits, SPLITS):
        splits = begin + tl.arange(0, SPLITS)
        is_split = splits < num_splits
        part_ids = row_id * num_splits + splits
        highests = tl.load(stats_ptr + part_ids * 2, mask=is_split, other=_LOWEST)
        totals = tl.load(stats_ptr + part_ids * 2 + 1, mask=is_split, other=0.0)
        parts = tl.load(
            partial_ptr + part_ids[:, None] * HEAD_DIM + dims[None, :],
            mask=is_split[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        # An unused split has no sums. Its memory may hold any values, and is read all the same: if the read had to
        # wait for the statistics, the kernel would take half as long again.
        parts = tl.where((totals > 0.0)[:, None], parts, 0.0)
        new_highest = tl.maximum(highest, tl.max(highests, 0))
        weights = tl.exp2(highests - new_highest)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights * totals, 0)
        total_out = total_out * shrink + tl.sum(weights[:, None] * parts, 0)
        highest = new_highest
    out = total_out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row_id * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
