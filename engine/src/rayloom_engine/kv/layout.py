"""KvLayout: the sizes of a rank's part of the KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The sizes of a rank's part of the cache: the layers of its stage, and the heads of its shard."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    # (key/value heads, head size) of each layer, if layers differ. The two fields above are then the largest values.
    layer_sizes: tuple[tuple[int, int], ...] | None = None

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(key/value heads, head size) of each layer."""
        return self.layer_sizes or ((self.num_kv_heads, self.head_dim),) * self.num_layers

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Returns the bytes of one block of `block_size` tokens in all layers."""
        return (
            2  # key and value
            * sum(num_kv_heads * head_dim for num_kv_heads, head_dim in self.sizes)
            * block_size
            * element_bytes
        )
