"""The memory of a step, without weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.models.costs import step_sequence_bytes, step_token_elements
from rayloom_engine.models.experts import Experts
from rayloom_engine.models.largest_step import LargestStep, StepBytes
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard

_BLOCK = 16  # positions of a KV block
# The following constants are those of csrc/cpu: kSegment, kPreferredRows, kTilesPerThread, kMostResultBytes.
_SEGMENT = 256  # positions of a context whose attention is computed together
_TILE_ROWS = 24
_TILES_PER_THREAD = 8
_MOST_RESULT_BYTES = 256 << 20
_GROUP = 32  # inputs of a quantised row that share a scale; quantised experts are cut between such groups
_HALF_LAYER_BYTES = 12 * 64  # counters of a half layer's phases
_TILE_BYTES = 56 + 24 + 8  # of an attention tile: its structure, one piece, and its entry among the tiles that are cut
# Alignment of the buffers, and further pieces of attention tiles. Tiles of S segments have about 2 (1 + ln 4S) further
# pieces of 24 bytes for each thread: 27 kB with 64 threads and a context of 131,072 positions.
_SLACK_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryArithmetic:
    """The properties of a rank on the C library that decide the sizes of its buffers."""

    operand_bytes: int  # bytes of an element that a matrix product reads
    num_threads: int
    is_quantised: bool  # a matrix is quantised, so its inputs are quantised in each step


def step_bytes(shape: ModelShape, num_shards: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Returns the bytes that a rank's largest step takes, without weights and KV cache, as in `models.costs`."""
    token_elements = step_token_elements(shape, num_shards)
    return num_tokens * token_elements * element_bytes + num_seqs * step_sequence_bytes(shape)


def library_step_bytes(
    shape: ModelShape, num_shards: int, step: LargestStep, arithmetic: LibraryArithmetic
) -> StepBytes:
    """Returns the bytes of a rank's largest step on the C library, without weights and KV cache."""
    angles = shape.head_dim * (1 if shape.traits.window_rope is None else 2)  # cosines and sines
    # The library's caller allocates these arrays, and the output of the final norm.
    token_bytes = 4 * (shape.hidden_size + angles) + arithmetic.operand_bytes * shape.hidden_size
    of_caller = step.num_tokens * token_bytes + step.num_rows * step_sequence_bytes(shape)
    partial = step.num_tokens * 4 * shape.hidden_size * (num_shards > 1)  # the rank's part of the sum of a half layer
    return StepBytes(
        usual=of_caller + step.num_tokens * _token_bytes(shape, num_shards, arithmetic),
        most=of_caller + partial + library_buffer_bytes(shape, num_shards, step, arithmetic),
    )


def library_buffer_bytes(shape: ModelShape, num_shards: int, step: LargestStep, arithmetic: LibraryArithmetic) -> int:
    """Returns the most bytes that csrc/cpu/step.cpp takes for the buffers of a step, without those of adapters."""
    token_bytes = _token_bytes(shape, num_shards, arithmetic) + _num_kv_heads(shape, num_shards) * _TILE_BYTES
    # The last layer computes only the rows whose logits are needed. These rows have buffers of their own, and each has
    # a block table (wanted_rows.cpp).
    num_rows = min(step.num_rows, step.num_tokens)
    row_bytes = token_bytes + 4 * shape.hidden_size + 8 * -(-step.context_len // _BLOCK) + 16
    results = _result_bytes(shape, num_shards, step, arithmetic.num_threads)
    counters = 2 * shape.num_layers * _HALF_LAYER_BYTES
    return step.num_tokens * token_bytes + num_rows * row_bytes + results + counters + _SLACK_BYTES


def _token_bytes(shape: ModelShape, num_shards: int, arithmetic: LibraryArithmetic) -> int:
    """Returns the bytes of a token in the buffers of step.cpp, without tiles and results of attention."""
    query = shape.query_size // num_shards
    num_kv_heads = _num_kv_heads(shape, num_shards)
    feed_forward = -(-shape.intermediate_size // num_shards) if shape.num_dense_layers else 0
    float32 = query + 2 * num_kv_heads * shape.head_dim  # q, k and v
    float32 += shape.hidden_size * shape.traits.has_updates  # before they are added to the residual stream
    operands = shape.hidden_size + 2 * query + feed_forward  # outputs of norms, queries, attention, gated product
    quantised = _quantised_bytes(max(shape.hidden_size, query, feed_forward)) if arithmetic.is_quantised else 0
    num_bytes = 4 * float32 + arithmetic.operand_bytes * operands + quantised
    if shape.experts is not None:
        num_bytes += _expert_token_bytes(shape.experts, shape.hidden_size, num_shards, arithmetic)
    return num_bytes


def _expert_token_bytes(experts: Experts, hidden_size: int, num_shards: int, arithmetic: LibraryArithmetic) -> int:
    """Returns the bytes of a token in the buffers of experts (csrc/cpu/experts.cpp).

    For each expert of the token, the buffers have the token's row, quantised if the expert's matrix is, and the gated
    product, also in quantised form. They also have the router's output, and the experts' ids and weights.
    """
    num_active = experts.num_experts_per_token + experts.num_shared
    inner = experts.active_size(num_shards, _GROUP if arithmetic.is_quantised else 1)
    row = max(hidden_size * arithmetic.operand_bytes, _quantised_bytes(hidden_size))
    gated = inner * arithmetic.operand_bytes + (_quantised_bytes(inner) if arithmetic.is_quantised else 0)
    return num_active * row + gated + 4 * (experts.num_experts + 1) + 24 * num_active


def _quantised_bytes(num_inputs: int) -> int:
    """Returns the bytes of a quantised row: int8, and 20 bytes for each group."""
    return num_inputs * (_GROUP + 20) // _GROUP


def _result_bytes(shape: ModelShape, num_shards: int, step: LargestStep, num_threads: int) -> int:
    """Returns the most bytes of attention results of segments (csrc/cpu/attention_plan.cpp).

    A step has them if it has few tiles for the threads. A tile has the query rows of a key/value head for some tokens.
    Both the step and its rows whose logits are needed have such results. These rows have tiles of one token.
    """
    if num_threads == 1:
        return 0
    num_heads = shape.num_heads // num_shards
    group = num_heads // _num_kv_heads(shape, num_shards)
    num_segments = -(-step.context_len // _SEGMENT)
    most_tiles = _TILES_PER_THREAD * num_threads
    total = 0
    for num_rows, tile_rows in ((step.num_tokens, max(group, _TILE_ROWS)), (step.num_rows, group)):
        values = min(num_rows * num_heads, most_tiles * tile_rows) * num_segments * shape.head_dim * 4
        # Beside the values, each row has the highest score and the sum of the weights.
        total += min(values, _MOST_RESULT_BYTES) * (shape.head_dim + 2) // shape.head_dim
    return total


def _num_kv_heads(shape: ModelShape, num_shards: int) -> int:
    return len(Shard(num_shards - 1, num_shards).kv_heads(shape.num_kv_heads))
