"""The thresholds of top_k, min_p and top_p, found without a sort.

Each logit is mapped to an integer, its key. A higher logit has a higher key. The threshold of top_k is the k-th highest
key. The threshold of top_p is the lowest key with this property: all tokens with higher keys together have a
probability below top_p. Each pass over the row tests 15 keys at once and so divides the range of keys by 16: at most 9
passes find a threshold exactly.

If several tokens equal a threshold, the kernel keeps as many of them as the rule allows, in ascending order of ids. The
C library does the same. With torch's sort, any of these tokens may be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095042)  # below the key of -infinity
PIECES = tl.constexpr(16)
ALL_TIES = tl.constexpr(2147483647)


@triton.jit
def key_of(x):
    """Returns an integer for each float32. A higher float32 has a higher integer. -0.0 has the key of 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Returns the float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(x, highest, inside, COUNTS: tl.constexpr):
    """Returns the weight of each token in the sum that a threshold limits: 1 with COUNTS, else exp(x - highest)."""
    if COUNTS:
        return inside.to(tl.float32)
    return tl.where(inside, tl.exp(x - highest), 0.0)


@triton.jit
def threshold_of(logits_ptr, V, highest, low, target, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the smallest key above `low` such that the tokens with larger keys weigh less than `target` together.

    The tokens above `low` weigh at least `target` together, so the threshold is the key of a token.
    """
    high = key_of(highest).to(tl.int64)
    pieces = tl.arange(0, PIECES) + 1
    while high - low > 1:
        keys = low + ((high - low) * pieces) // PIECES
        sums = tl.zeros((PIECES,), dtype=tl.float64)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
            weights = weights_of(x, highest, ids < V, COUNTS)
            is_above = key_of(x)[:, None] > keys[None, :]
            sums += tl.sum(tl.where(is_above, weights[:, None], 0.0), axis=0).to(tl.float64)
        passed = tl.sum((sums >= target).to(tl.int64), axis=0)
        span = high - low
        high = low + (span * (passed + 1)) // PIECES
        low += (span * passed) // PIECES
    return high.to(tl.int32)


@triton.jit
def above_and_equal(logits_ptr, V, highest, key, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the weight of the tokens above a key, float64, and the number of tokens that have the key."""
    above = tl.zeros((1,), dtype=tl.float64)
    equal = tl.zeros((1,), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        keys = key_of(x)
        weights = weights_of(x, highest, ids < V, COUNTS)
        above += tl.sum(tl.where(keys > key, weights, 0.0), axis=0).to(tl.float64)
        equal += tl.sum(((keys == key) & (ids < V)).to(tl.int32), axis=0)
    return tl.sum(above, axis=0), tl.sum(equal, axis=0)


@triton.jit
def id_of_tie(logits_ptr, V, key, number, BLOCK: tl.constexpr):
    """Returns the `number`-th lowest id of the tokens that have the key."""
    seen = tl.zeros((1,), dtype=tl.int32)
    found = tl.zeros((1,), dtype=tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        is_equal = ((key_of(x) == key) & (ids < V)).to(tl.int32)
        ranks = seen + tl.cumsum(is_equal, axis=0)
        found += tl.sum(tl.where((is_equal > 0) & (ranks == number), ids, 0), axis=0)
        seen += tl.sum(is_equal, axis=0)
    return tl.sum(found, axis=0)


@triton.jit
def thresholds_kernel(
    logits_ptr,
    ints_ptr,
    floats_ptr,
    values_ptr,
    thresholds_ptr,
    last_ties_ptr,
    V,
    B,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Writes the threshold of each of M rows, and the highest id of the kept tokens that equal the threshold.

    The logits are already divided by the temperature. `values` [M, B]: the highest logit of each block.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(ints_ptr + number * INTS)
    top_k = tl.load(ints_ptr + number * INTS + 5)
    top_p = tl.load(floats_ptr + number * FLOATS + 1)
    log_min_p = tl.load(floats_ptr + number * FLOATS + 2).to(tl.float32)
    logits_ptr += row * V
    blocks = tl.arange(0, BLOCKS)
    highest = tl.max(tl.load(values_ptr + number * B + blocks, mask=blocks < B, other=float("-inf")), axis=0)

    threshold = key_of(highest + log_min_p)  # log_min_p is -infinity without min_p
    num_ties = tl.full((), ALL_TIES, tl.int32)
    if (top_k > 0) & (top_k < V):
        low = tl.full((), LOWEST, tl.int64)
        k_threshold = threshold_of(logits_ptr, V, highest, low, top_k.to(tl.float64), COUNTS=True, BLOCK=BLOCK)
        if k_threshold >= threshold:
            num_above, _ = above_and_equal(logits_ptr, V, highest, k_threshold, COUNTS=True, BLOCK=BLOCK)
            threshold = k_threshold
            num_ties = (top_k - num_above.to(tl.int64)).to(tl.int32)
    if top_p < 1.0:
        above, num_equal = above_and_equal(logits_ptr, V, highest, threshold, COUNTS=False, BLOCK=BLOCK)
        equal = tl.exp(value_of(threshold) - highest).to(tl.float64)
        total = above + equal * tl.minimum(num_equal, num_ties).to(tl.float64)
        # The most likely token is kept even if top_p is 0.
        target = tl.maximum(total * top_p, 1e-30)
        if above >= target:
            low = threshold.to(tl.int64)
            threshold = threshold_of(logits_ptr, V, highest, low, target, COUNTS=False, BLOCK=BLOCK)
            above, num_equal = above_and_equal(logits_ptr, V, highest, threshold, COUNTS=False, BLOCK=BLOCK)
            equal = tl.exp(value_of(threshold) - highest).to(tl.float64)
            num_ties = num_equal
        num_kept = tl.ceil((target - above) / equal)
        num_ties = tl.minimum(num_ties, tl.maximum(tl.minimum(num_kept, 1e9), 1.0).to(tl.int32))
    last_tie = tl.full((), ALL_TIES, tl.int32)
    if num_ties != ALL_TIES:
        last_tie = id_of_tie(logits_ptr, V, threshold, num_ties, BLOCK=BLOCK)
    tl.store(thresholds_ptr + number, value_of(threshold))
    tl.store(last_ties_ptr + number, last_tie)
