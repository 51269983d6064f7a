"""Which part of each of its stage's layers a rank has (Megatron's cut, arXiv:1909.08053 section 3). Pure.

Heads are cut evenly, or the rank with one head more would hold up the others in every layer. Feed-forward rows and the
vocabulary need not divide: parts differ by one row at most, which costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.errors import ConfigError
from rayloom_engine.models.shape import ModelShape


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


def check_shards(shape: ModelShape, num_shards: int) -> None:
    """Raises ConfigError, with the numbers that work, when so many ranks cannot share a layer of the model."""
    choices = shard_counts(shape)
    if num_shards not in choices:
        raise ConfigError(
            f"tensor_parallel_size: {num_shards} ranks cannot share {shape.num_heads} attention heads and "
            f"{shape.num_kv_heads} key/value heads of a layer evenly; use {_either(choices)}, and for more ranks "
            f"pipeline_parallel_size, 1 to {shape.num_layers}"
        )


def shard_counts(shape: ModelShape) -> tuple[int, ...]:
    """All numbers of ranks that can share a layer: each has as many query heads, and those use whole key/value heads.

    A multiple of the key/value heads works too: each is then on several ranks.
    """
    most = min(shape.num_heads, shape.intermediate_size, shape.vocab_size)
    return tuple(
        count
        for count in range(1, most + 1)
        if shape.num_heads % count == 0 and (shape.num_kv_heads % count == 0 or count % shape.num_kv_heads == 0)
    )


def _either(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
