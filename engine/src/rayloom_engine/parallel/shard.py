"""Shard: the part that a rank holds of each layer of its stage. Pure. As in Megatron (arXiv:1909.08053 section 3).

Heads must divide evenly, because a rank with one head more would delay the others in every layer. Feed-forward rows and
the vocabulary may divide unevenly, because parts differ by at most one row (or one unit of rows), and this delays
little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of every matrix of a stage. In the last stage, the first shard's rank chooses tokens."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """True for the shard that adds biases to sums over all shards, and that gets the whole rows of logits."""
        return self.index == 0

    def part(self, size: int, unit: int = 1) -> range:
        """Returns this shard's range of the indices 0 to `size`. The shards' lengths differ by at most one unit.

        Every boundary is a multiple of `unit`, because quantised weights can be cut only between groups.
        """
        num_units = -(-size // unit)
        start = self.index * num_units // self.count * unit
        end = (self.index + 1) * num_units // self.count * unit
        return range(min(start, size), min(end, size))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Returns the key/value heads of this shard's query heads. With more shards than heads, shards share heads."""
        if self.count <= num_kv_heads:
            return self.part(num_kv_heads)
        head = self.index * num_kv_heads // self.count
        return range(head, head + 1)

    def widths(self, size: int) -> tuple[int, ...]:
        """Returns the lengths of all shards' parts of `size`, in the order of shards."""
        return tuple(len(Shard(index, self.count).part(size)) for index in range(self.count))


WHOLE = Shard(0, 1)
