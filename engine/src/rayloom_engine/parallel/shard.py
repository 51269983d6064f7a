"""Shard: the part of each of its stage's layers that a rank has (Megatron's cut, arXiv:1909.08053 section 3). Pure.

Heads are cut evenly, because a rank with one head more would delay the others in every layer. Feed-forward rows and the
vocabulary need not divide: parts differ by one row (or one unit of rows) at most, which costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of every matrix of a stage, of `count` parts. The first shard of the last stage chooses tokens."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """True if this shard adds the biases of sums over all parts, and gets whole rows of logits."""
        return self.index == 0

    def part(self, size: int, unit: int = 1) -> range:
        """This shard's indices of `size`. All parts together are 0 to `size`; lengths differ by one unit at most.

        Every cut is a multiple of `unit`, as weights that are quantised in groups need it.
        """
        num_units = -(-size // unit)
        start = self.index * num_units // self.count * unit
        end = (self.index + 1) * num_units // self.count * unit
        return range(min(start, size), min(end, size))

    def kv_heads(self, num_kv_heads: int) -> range:
        """The key/value heads that its query heads use. With more shards than heads, neighbours have the same head."""
        if self.count <= num_kv_heads:
            return self.part(num_kv_heads)
        head = self.index * num_kv_heads // self.count
        return range(head, head + 1)

    def widths(self, size: int) -> tuple[int, ...]:
        """The lengths of all shards' parts of `size`, in the order of shards."""
        return tuple(len(Shard(index, self.count).part(size)) for index in range(self.count))


WHOLE = Shard(0, 1)
