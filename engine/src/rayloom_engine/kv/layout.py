"""KvLayout: the sizes of a rank's part of the KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The sizes of a rank's part of the cache: the layers of its stage, and the heads of its shard."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Returns the bytes of one block of `block_size` tokens in all layers."""
        return (
            2  # key and value
            * self.num_layers
            * self.num_kv_heads
            * self.head_dim
            * block_size
            * element_bytes
        )
