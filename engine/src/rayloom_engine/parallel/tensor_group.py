"""TensorGroup: sums and gathers arrays over the ranks that share the layers of a stage.

Legend: N rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

ArrayT = TypeVar("ArrayT")  # a torch tensor or a numpy array


class TensorGroup(Protocol[ArrayT]):
    """A rank's connection to the other ranks of its stage.

    All ranks of the stage must call the same methods in the same order. Otherwise they all wait without end.
    """

    def all_reduce(self, part: ArrayT) -> ArrayT:
        """Returns the sum of all ranks' parts, bit for bit the same on each rank. Overwrites `part`."""

    def gather(self, part: ArrayT) -> ArrayT | None:
        """Joins the ranks' columns of logits. Returns [N, V] on the first rank, None on the other ranks."""


class OneRank:
    """Implements TensorGroup for a rank that is alone in its stage: its part is the whole."""

    def all_reduce(self, part: ArrayT) -> ArrayT:
        return part

    def gather(self, part: ArrayT) -> ArrayT | None:
        return part
