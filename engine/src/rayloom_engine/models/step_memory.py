"""The memory of a step, without weights and KV cache."""

from __future__ import annotations

from rayloom_engine.models.costs import step_sequence_bytes, step_token_elements
from rayloom_engine.models.shape import ModelShape


def step_bytes(shape: ModelShape, num_shards: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Returns the bytes that a rank's largest step takes, without weights and KV cache, as in `models.costs`."""
    token_elements = step_token_elements(shape, num_shards)
    return num_tokens * token_elements * element_bytes + num_seqs * step_sequence_bytes(shape)
