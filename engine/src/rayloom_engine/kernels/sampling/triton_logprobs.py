"""Log-probabilities and ranks of given tokens: one program for each row, one pass over it.

Legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logprobs_kernel(logits_ptr, ids_ptr, log_sums_ptr, logprobs_ptr, ranks_ptr, V, BLOCK: tl.constexpr):
    """Writes the logarithm of the sum of exp(logits), the token's log-probability, and its rank, which counts from 1.

    A rank counts tokens with a higher logit, because different logits may round to the same log-probability.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    chosen = tl.load(logits_ptr + tl.load(ids_ptr + row))
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    rank = tl.full((), 1, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        # The lowest float32 replaces -infinity here, because the difference of two infinities is NaN.
        new_highest = tl.maximum(highest, tl.maximum(tl.max(x, axis=0), -3.4028234663852886e38))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest), axis=0)
        highest = new_highest
        rank += tl.sum((x > chosen).to(tl.int32), axis=0)
    log_total = tl.log(total)
    tl.store(log_sums_ptr + row, highest + log_total)
    tl.store(logprobs_ptr + row, (chosen - highest) - log_total)
    tl.store(ranks_ptr + row, rank)
