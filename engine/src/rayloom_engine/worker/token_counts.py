"""TokenCounts: how often each token occurs in the sequences with penalties, as a table on the device.

A table row stays with its slot. A step adds only the tokens that are new since the slot's last step, so a long sequence
costs no more than a short one.

Legend: R rows of the table, V vocabulary, E entries.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rayloom_engine.worker.slots import Slot

Ids = npt.NDArray[np.int64]


class TokenCounts:
    """The table of counts.

    An element is twice the number of times that a token was generated, plus 1 if the token is in the prompt.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._rows: weakref.WeakKeyDictionary[Slot, int] = weakref.WeakKeyDictionary()
        self._num_counted: weakref.WeakKeyDictionary[Slot, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []
        self.table_RV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def row_of(self, slot: Slot) -> int:
        """Returns the slot's row. A slot without a row gets a free row, which `additions` clears."""
        row = self._rows.get(slot)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._rows[slot] = row
            self._num_counted[slot] = 0
            weakref.finalize(slot, self._free.append, row)
        return row

    def additions(self, slots: Sequence[Slot]) -> tuple[Ids, Ids]:
        """Returns what the caller must add to the table for these slots: places [E], all different, and addends [E].

        Clears the rows of new slots. A place is row * V + token id. No two calls count the same position of a slot.
        """
        places: list[Ids] = []
        addends: list[Ids] = []
        new_rows: list[int] = []
        for slot in slots:
            row = self.row_of(slot)
            start = self._num_counted[slot]
            if not start:
                new_rows.append(row)
            ids, numbers = _counts(slot, start)
            places.append(row * self._vocab_size + ids)
            addends.append(numbers)
            self._num_counted[slot] = slot.num_tokens
        if new_rows:
            self.table_RV[new_rows] = 0
        if not places:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return np.concatenate(places), np.concatenate(addends)

    def _grow(self) -> None:
        """Doubles the number of rows."""
        num_rows = self.table_RV.shape[0]
        new_RV = self.table_RV.new_zeros((max(4, 2 * num_rows), self._vocab_size))
        new_RV[:num_rows] = self.table_RV
        self.table_RV = new_RV
        self._free += range(num_rows, new_RV.shape[0])


def _counts(slot: Slot, start: int) -> tuple[Ids, Ids]:
    """Returns the distinct tokens from position `start` on, and the addend of each token for its element."""
    num_prompt = slot.num_prompt_tokens
    generated = slot.token_ids[max(start, num_prompt) : slot.num_tokens]
    ids, numbers = np.unique(generated, return_counts=True)
    addends = 2 * numbers.astype(np.int64)
    if start >= num_prompt:
        return ids, addends
    prompt_ids = np.unique(slot.token_ids[max(start, slot.num_unknown) : num_prompt])
    all_ids, places = np.unique(np.concatenate([ids, prompt_ids]), return_inverse=True)
    sums = np.zeros(len(all_ids), dtype=np.int64)
    np.add.at(sums, places, np.concatenate([addends, np.ones(len(prompt_ids), dtype=np.int64)]))
    return all_ids, sums
