"""The memory of a step, without weights and KV cache."""

from __future__ import annotations

from rayloom_engine.models.costs import step_sequence_bytes, step_token_elements
from rayloom_engine.models.experts import Experts
from rayloom_engine.models.shape import ModelShape


def step_bytes(shape: ModelShape, num_shards: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Returns the bytes that a rank's largest step takes, without weights and KV cache, as in `models.costs`."""
    token_elements = step_token_elements(shape, num_shards)
    return num_tokens * token_elements * element_bytes + num_seqs * step_sequence_bytes(shape)


def library_step_bytes(
    shape: ModelShape, num_shards: int, *, operand_bytes: int, num_tokens: int, num_seqs: int
) -> int:
    """Returns the bytes of a rank's largest step on the C library, without weights and KV cache.

    `operand_bytes`: bytes of an element that a matrix product reads. csrc/cpu/step.cpp allocates most of the buffers
    that are counted here.
    """
    query = shape.query_size // num_shards
    float32 = shape.hidden_size + query + 2 * shape.kv_size // num_shards  # residual stream, q, k and v
    feed_forward = -(-shape.intermediate_size // num_shards) if shape.num_dense_layers else 0
    operands = 2 * shape.hidden_size + 2 * query + feed_forward  # outputs of norms, queries, attention, gated product
    angles = shape.head_dim * (1 if shape.traits.window_rope is None else 2)  # float32 cosines and sines
    updates = shape.hidden_size * shape.traits.has_updates  # float32, before they are added to the residual stream
    quantised = max(shape.hidden_size, query, feed_forward) * 13 // 8  # int8, and 20 bytes for 32 inputs
    token_bytes = 4 * (float32 + angles + updates) + operand_bytes * operands + quantised
    if shape.experts is not None:
        token_bytes += _expert_token_bytes(shape.experts, shape.hidden_size, num_shards, operand_bytes)
    return num_tokens * token_bytes + num_seqs * step_sequence_bytes(shape)


def _expert_token_bytes(experts: Experts, hidden_size: int, num_shards: int, operand_bytes: int) -> int:
    """Returns the bytes of a token in the buffers of experts (csrc/cpu/experts.cpp).

    For each expert of the token, the buffers have the token's row and the gated product, each also in quantised form.
    They also have the router's output, and the experts' ids and weights.
    """
    num_active = experts.num_experts_per_token + experts.num_shared
    inner = experts.active_size(num_shards)
    rows = num_active * hidden_size + inner
    return rows * operand_bytes + rows * 13 // 8 + 4 * (experts.num_experts + 1) + 24 * num_active
