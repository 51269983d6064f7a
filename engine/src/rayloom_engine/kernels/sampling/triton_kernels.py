"""Kernels that choose tokens: scan, adjust, draw, reduce.

A row of the vocabulary is cut into blocks, so that all parts of a GPU work on a small batch, too. Each block has its
best token; `reduce_kernel` finds the best block. The draw is Gumbel-max with the noise of `worker/noise.py`: SplitMix64
in 64 bits, and logarithms in float64.

The order of roundings is that of worker/sampler.py, so products and sums must not be fused (`enable_fp_fusion=False`).

Legend: N rows of logits, M of these rows that are not simply greedy, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
NO_TOKEN = tl.constexpr(2147483647)  # above every token id


@triton.jit
def best_of(values, ids):
    """Returns the highest value and the lowest id that has it. A NaN anywhere makes the value NaN."""
    highest = tl.max(values, axis=0)
    best = tl.min(tl.where(values == highest, ids, NO_TOKEN), axis=0)
    has_nan = tl.max((values != values).to(tl.int32), axis=0)
    return tl.where(has_nan > 0, float("nan"), highest), best


@triton.jit
def scan_kernel(logits_ptr, values_ptr, ids_ptr, V, BLOCK: tl.constexpr):
    """Writes the best token of each block, [N, B], of the raw logits, [N, V]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    highest, best = best_of(logits, ids)
    place = row * tl.num_programs(1) + block
    tl.store(values_ptr + place, highest)
    tl.store(ids_ptr + place, best)


@triton.jit(do_not_specialize=["num_entries"])
def add_kernel(values_ptr, places_ptr, addends_ptr, num_entries, BLOCK: tl.constexpr):
    """Adds addends [E] to the values at the places [E], which all differ. As a logit's addend, -inf bans a token."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < num_entries
    places = tl.load(places_ptr + entries, mask=inside, other=0)
    values = tl.load(values_ptr + places, mask=inside, other=0)
    addends = tl.load(addends_ptr + entries, mask=inside, other=0).to(values.dtype)
    tl.store(values_ptr + places, values + addends, mask=inside)


@triton.jit
def adjust_kernel(
    logits_ptr,
    ints_ptr,
    floats_ptr,
    masks_ptr,
    counts_ptr,
    values_ptr,
    V,
    mask_words,
    BLOCK: tl.constexpr,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Applies masks, penalties and temperature to M rows of logits in place. Writes the highest result of each block.

    `Rows` has the columns of ints [M, INTS] and floats [M, FLOATS]. A mask has one bit for each token. A count is
    twice the number of times that a token was generated, plus 1 if it is in the prompt.
    """
    number = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(ints_ptr + number * INTS)
    mask_row = tl.load(ints_ptr + number * INTS + 2)
    count_row = tl.load(ints_ptr + number * INTS + 3)
    temperature = tl.load(floats_ptr + number * FLOATS).to(tl.float32)
    repetition = tl.load(floats_ptr + number * FLOATS + 3).to(tl.float32)
    presence = tl.load(floats_ptr + number * FLOATS + 4).to(tl.float32)
    frequency = tl.load(floats_ptr + number * FLOATS + 5).to(tl.float32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < V
    x = tl.load(logits_ptr + row * V + ids, mask=inside, other=float("-inf"))
    words = tl.load(masks_ptr + mask_row * mask_words + ids // 32, mask=inside & (mask_row >= 0), other=-1)
    x = tl.where(((words >> (ids % 32)) & 1) != 0, x, float("-inf"))
    counts = tl.load(counts_ptr + count_row * V + ids, mask=inside & (count_row >= 0), other=0)
    x = tl.where(counts != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    generated = (counts >> 1).to(tl.float32)
    x = tl.where(generated > 0, x - (presence + frequency * generated), x)
    x = tl.div_rn(x, temperature)
    tl.store(logits_ptr + row * V + ids, x, mask=inside)
    tl.store(values_ptr + number * tl.num_programs(1) + block, tl.max(x, axis=0))


@triton.jit
def draw_kernel(
    logits_ptr,
    ints_ptr,
    thresholds_ptr,
    last_ties_ptr,
    values_ptr,
    ids_ptr,
    V,
    BLOCK: tl.constexpr,
    INTS: tl.constexpr,
):
    """Writes, for each block of M rows, the kept token with the highest sum of logit and noise.

    A token is kept if its logit is above the threshold. A token whose logit equals the threshold is kept if its id is
    at most the id of the row's last tie. Greedy rows have no noise.
    """
    number = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(ints_ptr + number * INTS)
    key = tl.load(ints_ptr + number * INTS + 1)
    is_greedy = tl.load(ints_ptr + number * INTS + 4)
    threshold = tl.load(thresholds_ptr + number)
    last_tie = tl.load(last_ties_ptr + number)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf"))
    is_kept = (x > threshold) | ((x == threshold) & (ids <= last_tie))
    if is_greedy == 0:
        x += gumbel(key, ids)
    highest, best = best_of(tl.where(is_kept, x, float("-inf")), ids)
    place = number * tl.num_programs(1) + block
    tl.store(values_ptr + place, highest)
    tl.store(ids_ptr + place, best)


@triton.jit
def gumbel(key, ids):
    """Returns the noise of token ids, float32, for a key of `worker/noise.py`."""
    bits = key.to(tl.uint64) + (ids + 1).to(tl.uint64) * GOLDEN
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    bits = bits ^ (bits >> 31)
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def reduce_kernel(
    raw_values_ptr,
    raw_ids_ptr,
    values_ptr,
    ids_ptr,
    numbers_ptr,
    out_ptr,
    B,
    BLOCKS: tl.constexpr,
):
    """Writes the token of each of N rows, int64: -1 if the raw logits are not finite.

    `numbers` [N]: the row's index among the M rows; -1 for a greedy row, whose token has the highest raw logit.
    """
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < B
    raw = tl.load(raw_values_ptr + row * B + blocks, mask=inside, other=float("-inf"))
    raw_ids = tl.load(raw_ids_ptr + row * B + blocks, mask=inside, other=NO_TOKEN)
    highest, token = best_of(raw, raw_ids)
    number = tl.load(numbers_ptr + row)
    if number >= 0:
        drawn = tl.load(values_ptr + number * B + blocks, mask=inside, other=float("-inf"))
        drawn_ids = tl.load(ids_ptr + number * B + blocks, mask=inside, other=NO_TOKEN)
        _, token = best_of(drawn, drawn_ids)
    is_finite = (highest == highest) & (tl.abs(highest) != float("inf"))
    tl.store(out_ptr + row, tl.where(is_finite, token, -1).to(tl.int64))
