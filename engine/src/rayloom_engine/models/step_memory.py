"""The memory of a step beside weights and KV cache."""

from __future__ import annotations

from rayloom_engine.models.shape import ModelShape


def step_bytes(shape: ModelShape, num_shards: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Bytes that a rank's largest step holds at once beside weights and cache, counted off the decoder's code.

    A token has the residual stream, its normed form and a block's result, and the wider of attention and MLP; a
    sequence has its logits in float32, a copy of them and their probabilities.
    """
    feed_forward = 3 * -(-shape.intermediate_size // num_shards)  # gate, up, their product
    attention = 2 * (shape.query_size + shape.kv_size) // num_shards
    token_width = 3 * shape.hidden_size + max(feed_forward, attention)
    return num_tokens * token_width * element_bytes + 3 * num_seqs * shape.vocab_size * 4
