"""TensorGroup: the sums and gathers of the ranks that share a stage's layers.

Legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch


class TensorGroup(Protocol):
    """Every rank of the stage calls the same methods in the same order; otherwise all of them wait."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, bit for bit the same on each. `part` is overwritten."""

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """[N, V] from each rank's part of the vocabulary, on the first rank; None on the others."""


class OneRank:
    """Implements TensorGroup for a rank that has all of its stage's layers: every part is the whole."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        return part
