"""PagedBatch: the sequences of a step and their cache blocks, as numpy arrays.

Legend: S sequences of the step, B blocks in a table, T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """The tokens that one step computes. The tokens of a sequence are contiguous in T; sequences follow each other."""

    query_lens: tuple[int, ...]  # tokens computed in this step, per sequence, each >= 1
    context_lens: tuple[int, ...]  # tokens in the cache after this step, per sequence, each >= query_len
    block_tables_SB: npt.NDArray[np.int64]  # padded with 0
    slot_mapping_T: npt.NDArray[np.int64]  # per token: block id * block size + offset
    adapters_T: npt.NDArray[np.int32] | None = None  # per token: adapter slot, or -1; None: no token has an adapter
