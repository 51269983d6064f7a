"""BlockTables: the KV blocks of every slot, in one matrix. A step writes only the entries that its plan changes.

Legend: N slots, B blocks in the longest table so far. Row n is the block table of slot n, padded with 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class BlockTables:
    """The block tables of all slots. Rows and columns grow as needed and never shrink."""

    def __init__(self) -> None:
        self._ids_NB: IntArray = np.zeros((8, 8), dtype=np.int64)
        self._counts_N: IntArray = np.zeros(8, dtype=np.int64)  # number of valid entries of each row; the rest are 0

    def of(self, slot: int) -> IntArray:
        """Returns a slot's block ids, in order of position, as a view that the next plan may change."""
        return self._ids_NB[slot, : self._counts_N[slot]]

    def begin(self, slot: int, block_ids: tuple[int, ...], shared_with: int = 0, num_shared: int = 0) -> None:
        """Sets a slot's table to the first `num_shared` blocks of the slot `shared_with`, then `block_ids`."""
        end = num_shared + len(block_ids)
        self._reserve(slot, end)
        row_B = self._ids_NB[slot]
        row_B[:num_shared] = self._ids_NB[shared_with, :num_shared]
        row_B[num_shared:end] = block_ids
        row_B[end : self._counts_N[slot]] = 0
        self._counts_N[slot] = end

    def append(self, slot: int, block_ids: tuple[int, ...]) -> None:
        begin = int(self._counts_N[slot])
        end = begin + len(block_ids)
        self._reserve(slot, end)
        self._ids_NB[slot, begin:end] = block_ids
        self._counts_N[slot] = end

    def rows(self, slots_S: IntArray, num_blocks_S: IntArray) -> IntArray:
        """Returns copies of the first `num_blocks_S` entries of these slots' tables, padded with 0 to the longest."""
        width = int(num_blocks_S.max())
        tables_SB = self._ids_NB[slots_S, :width]
        if (self._counts_N[slots_S] > num_blocks_S).any():  # tables may name blocks that this step does not reach
            tables_SB[np.arange(width) >= num_blocks_S[:, None]] = 0
        return tables_SB

    def places(self, slots_T: IntArray, positions_T: IntArray, block_size: int) -> IntArray:
        """Returns the place in the cache of each (slot, position): block id * block size + offset."""
        return self._ids_NB[slots_T, positions_T // block_size] * block_size + positions_T % block_size

    def _reserve(self, slot: int, num_blocks: int) -> None:
        """Enlarges the matrix so that row `slot` has room for `num_blocks` entries."""
        num_rows, width = self._ids_NB.shape
        if slot < num_rows and num_blocks <= width:
            return
        while num_rows <= slot:
            num_rows *= 2
        while width < num_blocks:
            width *= 2
        old_NB, old_N = self._ids_NB, self._counts_N
        self._ids_NB = np.zeros((num_rows, width), dtype=np.int64)
        self._ids_NB[: old_NB.shape[0], : old_NB.shape[1]] = old_NB
        self._counts_N = np.zeros(num_rows, dtype=np.int64)
        self._counts_N[: len(old_N)] = old_N
