"""Costs: the memory that a model takes, and the work of its head, in parts that a reader adds up. Pure, without torch.

Each part is given for every number of tensor-parallel ranks that can share a layer. Ranks of one stage differ slightly:
where a matrix cannot be cut evenly, some have one more row, and only one rank has the biases that are added to a sum
over ranks. Each number is that of the rank with the largest part. So a sum of parts is exact if one rank has all the
largest parts, and is never too small.

    bytes of a rank's weights = layers of its stage + embedding (first stage) or head (last) or both (only stage)
    bytes of a KV block       = block size x sum over the layers of its stage of `kv`
    bytes of a step           = tokens x step.token + sequences x step.sequence_bytes

To get bytes, multiply a part's `elements` by the bytes of the type in which a rank computes (for `kv`: in which it
caches). `bytes` of a part are added as they are, whatever the type, for example for packed weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.models.checkpoint.limits import MAX_LAYERS, MAX_POSITIONS
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.models.shape import DTYPE_BYTES, ModelShape
from rayloom_engine.parallel.shard import Shard

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Amounts(_Document):
    """The memory that one part takes, a number for each of `tensor`."""

    elements: tuple[int, ...] = Field(description="Numbers in the type in which a rank computes.")
    bytes: tuple[int, ...] | None = Field(None, description="Bytes beside them, whatever that type is; none if absent.")


class LayerKind(_Document):
    """Layers that cost the same."""

    weights: Amounts = Field(description="Weights of one such layer.")
    kv: Amounts = Field(description="Keys and values of one token in one such layer.")
    window: int | None = Field(
        None, ge=1, le=MAX_POSITIONS, description="Positions that a token sees, itself included; absent for all."
    )


class StepCosts(_Document):
    """Memory of the largest step of a rank, beside weights and KV cache."""

    token: Amounts = Field(description="Memory of one token.")
    sequence_bytes: int = Field(description="Bytes of one sequence, for any number of ranks.")


class Costs(_Document):
    tensor: tuple[int, ...] = Field(
        description="Numbers of ranks that can share a layer, ascending from 1; the order of all other lists."
    )
    embedding: Amounts = Field(description="Weights of the first of several stages, beside its layers.")
    head: Amounts = Field(description="Weights of the last of several stages, beside its layers: final norm and head.")
    both: Amounts = Field(
        description="Weights of an only stage, beside its layers; a matrix with two uses counts once."
    )
    kinds: tuple[LayerKind, ...] = Field(description="The kinds of layers; the first is called a, the second b.")
    layers: str = Field(max_length=MAX_LAYERS, description="The kind of each layer, run-length coded: 5ab is aaaaab.")
    head_layers: float = Field(
        ge=0.0, description="The head's work, in layers: stages are cut so that the slowest is the fastest possible."
    )
    step: StepCosts = Field(description="Memory of the largest step of a rank.")
    checkpoint_bytes: int = Field(ge=1, description="Bytes of the weights as a folder of safetensors holds them.")


def model_costs(shape: ModelShape, tensor: Sequence[int]) -> Costs:
    """Returns the costs of a model for the numbers of ranks in `tensor`.

    Each of these must be one of `shard_counts(shape)`.
    """

    if isinstance(shape, MeasuredShape):
        return _measured_costs(shape)

    def most(elements_of: Callable[[Shard], int]) -> Amounts:
        # The last shard has the longest part of each uneven matrix. The first has the biases that are added to a sum
        # over ranks.
        return Amounts(elements=tuple(max(elements_of(Shard(0, n)), elements_of(Shard(n - 1, n))) for n in tensor))

    def vocabulary(shard: Shard) -> int:
        return len(shard.part(shape.vocab_size)) * shape.hidden_size

    def both(shard: Shard) -> int:
        return vocabulary(shard) * (1 if shape.tie_word_embeddings else 2) + shape.hidden_size

    windows = tuple(dict.fromkeys(shape.layer_windows))
    weights = most(lambda shard: layer_elements(shape, shard))
    kv = most(lambda shard: 2 * len(shard.kv_heads(shape.num_kv_heads)) * shape.head_dim)
    return Costs(
        tensor=tuple(tensor),
        embedding=most(vocabulary),
        head=most(lambda shard: vocabulary(shard) + shape.hidden_size),
        both=most(both),
        kinds=tuple(LayerKind(weights=weights, kv=kv, window=window) for window in windows),
        layers=run_lengths([windows.index(window) for window in shape.layer_windows]),
        head_layers=shape.head_layers,
        step=StepCosts(
            token=Amounts(elements=tuple(step_token_elements(shape, n) for n in tensor)),
            sequence_bytes=step_sequence_bytes(shape),
        ),
        checkpoint_bytes=shape.weight_bytes(DTYPE_BYTES[shape.checkpoint_dtype]),
    )


def _measured_costs(shape: MeasuredShape) -> Costs:
    """Returns the costs of a model of the transformers backend, whose ranks cannot share a layer."""

    def one(elements: int) -> Amounts:
        return Amounts(elements=(elements,))

    layers = list(zip(shape.layer_parameters, shape.layer_kv_sizes, shape.layer_windows, strict=True))
    kinds = tuple(dict.fromkeys(layers))
    if len(kinds) > len(_LETTERS):
        # Too many kinds for the document: every layer counts as the largest.
        num_kv_heads, head_dim = max(shape.layer_kv_sizes, key=math.prod)
        kinds = ((max(shape.layer_parameters), (num_kv_heads, head_dim), shape.attention_span),)
        layers = list(kinds) * shape.num_layers
    return Costs(
        tensor=(1,),
        embedding=one(shape.embedding_parameters),
        head=one(shape.final_parameters),
        both=one(shape.both_parameters),
        kinds=tuple(
            LayerKind(weights=one(weights), kv=one(2 * math.prod(kv_sizes)), window=window)
            for weights, kv_sizes, window in kinds
        ),
        layers=run_lengths([kinds.index(layer) for layer in layers]),
        head_layers=shape.head_layers,
        step=StepCosts(
            token=one(step_token_elements(shape, 1)),
            sequence_bytes=step_sequence_bytes(shape),
        ),
        checkpoint_bytes=shape.weight_bytes(DTYPE_BYTES[shape.checkpoint_dtype]),
    )


def layer_elements(shape: ModelShape, shard: Shard) -> int:
    """Returns the number of weights that a shard has of one layer, as `models.empty` allocates them."""
    hidden = shape.hidden_size
    query = len(shard.part(shape.num_heads)) * shape.head_dim
    qkv = query + 2 * len(shard.kv_heads(shape.num_kv_heads)) * shape.head_dim
    feed_forward = len(shard.part(shape.intermediate_size))
    norms = 2 * hidden + 2 * shape.head_dim * shape.qk_norm
    biases = qkv * shape.qkv_bias + 2 * feed_forward * shape.mlp_bias
    if shard.is_first:
        biases += hidden * (shape.o_bias + shape.mlp_bias)
    matrices = hidden * (
        qkv
        + query  # o
        + 3 * feed_forward  # gate, up, down
    )
    return matrices + norms + biases


def step_token_elements(shape: ModelShape, num_shards: int) -> int:
    """Returns the number of elements that one token of a step takes on a rank, counted from the decoder's code.

    These are the residual stream, its normalised form, a block's result, and the wider of attention and MLP.
    """
    feed_forward = 3 * -(-shape.intermediate_size // num_shards)  # gate, up, their product
    attention = 2 * (shape.query_size + shape.kv_size) // num_shards
    return 3 * shape.hidden_size + max(feed_forward, attention)


def step_sequence_bytes(shape: ModelShape) -> int:
    """Returns the bytes that one sequence of a step takes on the last stage: float32 logits, a copy of them, and
    probabilities.
    """
    return 3 * shape.vocab_size * 4


def run_lengths(kinds: Sequence[int]) -> str:
    """Run-length codes `kinds`: one letter per run (kind 0 is a), after the run's length if above 1.

    Never longer than `kinds`.
    """
    runs = ((len(list(run)), _LETTERS[kind]) for kind, run in groupby(kinds))
    return "".join(letter if length == 1 else f"{length}{letter}" for length, letter in runs)
