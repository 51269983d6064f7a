"""The choice of a step's tokens on a GPU, as `worker/sampler.py` defines it for one row.

`triton_gpu.py` launches the kernels: `triton_kernels.py` adjusts logits, draws and reduces; `triton_thresholds.py`
finds thresholds without a sort; `triton_logprobs.py` computes log-probabilities and ranks.
`worker/gpu_sampler.py` makes the kernels' inputs from slots. The C library has a sampler of its own
(`worker/cpu_sampler.py`).

Legend: N rows of logits, M of these rows that are not simply greedy, V vocabulary, W = V / 32 words of a mask,
E entries, B blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Columns of Rows.ints: row of the logits; key of the noise (worker/noise.py); row of the mask and row of the counts, -1
# for none; 1 for a greedy row, else 0; top_k, 0 for none.
NUM_INTS = 6
# Columns of Rows.floats: temperature, 1 for a greedy row; top_p, 1 for none; logarithm of min_p, -infinity for none;
# repetition, presence and frequency penalty.
NUM_FLOATS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step that need more than the highest raw logit. All tensors are on the device of the logits."""

    ints: torch.Tensor  # int64 [M, NUM_INTS]
    floats: torch.Tensor  # float64 [M, NUM_FLOATS]; a kernel rounds them to float32 where torch does
    numbers_N: torch.Tensor  # int64: for each row of the logits, its index among the M rows, or -1
    places_E: torch.Tensor  # int64: indices of elements of the logits, row * V + token id; all differ
    addends_E: torch.Tensor  # float64: added to these elements before all other rules; -infinity bans a token
    masks: torch.Tensor | None  # int32 [masks, W]: one bit for each token that may be chosen
    counts: torch.Tensor | None  # int32 [rows, V]: twice the times a token was generated, plus 1 if it is in the prompt
    has_thresholds: bool  # True if a row has top_k, top_p or min_p
