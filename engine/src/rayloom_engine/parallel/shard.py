"""Which part of each of its stage's layers a rank has (Megatron's cut, arXiv:1909.08053 section 3). Pure.

Heads are cut evenly, or the rank with one head more would hold up the others in every layer. Feed-forward rows and the
vocabulary need not divide: parts differ by one row at most, which costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of every matrix of a stage. The rank of the first one chooses tokens on the last stage."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """It adds the biases of sums over all parts, and gets whole rows of logits."""
        return self.index == 0

    def part(self, size: int) -> range:
        """Its indices of `size`: all parts together are 0 to `size`, and no two differ in length by more than one."""
        return range(self.index * size // self.count, (self.index + 1) * size // self.count)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The key/value heads that its query heads use. More ranks than those heads: neighbours have the same one."""
        if self.count <= num_kv_heads:
            return self.part(num_kv_heads)
        head = self.index * num_kv_heads // self.count
        return range(head, head + 1)

    def widths(self, size: int) -> tuple[int, ...]:
        """How long every rank's part is, not only this one's."""
        return tuple(len(Shard(index, self.count).part(size)) for index in range(self.count))


WHOLE = Shard(0, 1)
