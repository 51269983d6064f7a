"""Costs: the memory that a model takes, and the work of its head, in parts that a reader adds up. Pure, without torch.

Each part has a value for every tensor-parallel size that the model allows. The ranks of a stage need slightly
different amounts. If a matrix cannot be cut evenly, some ranks have one more row. Biases that are added to a sum over
ranks are on one rank alone. Each number here is the largest amount that any rank needs for this part. So a sum of parts
is never too small, and it is exact if one rank has all the largest parts.

    bytes of a rank's weights = layers of its stage + embedding (first stage) or head (last) or both (only stage)
    bytes of a KV block       = block size x sum over the layers of its stage of `kv`
    bytes of a step           = tokens x step.token + sequences x step.sequence_bytes
    bytes of a LoRA adapter   = layers of its stage x adapters.layer x LoRA rank,
                                with rank and product rounded up as in adapters/memory.py

To get bytes, multiply a part's `elements` by the bytes of a number in the type in which a rank computes (`kv`: in the
type of the KV cache). `bytes` of a part are added as they are, whatever the type. For a quantised checkpoint,
`elements` counts the weights as dense. On a rank that keeps quantised weights, `kept_elements` and `kept_bytes` take
the place of `elements` and `bytes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.models.adapters.memory import PAGE_BYTES, RANK_MULTIPLE, adapter_token_bytes, layer_elements
from rayloom_engine.models.adapters.support import can_have_adapters
from rayloom_engine.models.checkpoint.limits import MAX_LAYERS, MAX_POSITIONS
from rayloom_engine.models.experts import Experts
from rayloom_engine.models.measured_shape import MeasuredShape, MeasuredShare
from rayloom_engine.models.quantised.amounts import Amount, checkpoint_bytes, ends_amount, layer_amount, layer_forms
from rayloom_engine.models.shape import DTYPE_BYTES, ModelShape
from rayloom_engine.parallel.shard import Shard

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_KINDS = 6  # kinds of layers; few, because the document must fit in a pod's termination message


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Amounts(_Document):
    """The memory that one part takes, a number for each of `tensor`."""

    elements: tuple[int, ...] = Field(description="Numbers in the type in which a rank computes.")
    bytes: tuple[int, ...] | None = Field(None, description="Bytes beside them, whatever that type is; none if absent.")
    kept_elements: tuple[int, ...] | None = Field(
        None, description="In place of `elements` on a rank that keeps the checkpoint's quantised weights."
    )
    kept_bytes: tuple[int, ...] | None = Field(
        None, description="In place of `bytes` on a rank that keeps the checkpoint's quantised weights."
    )


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


class AdapterCosts(_Document):
    """Memory of LoRA adapters, each of which updates all matrices that an adapter can update."""

    layer: Amounts = Field(description="Weights that an adapter of LoRA rank 1 has in one layer.")
    token_bytes: tuple[int, ...] = Field(
        description="Bytes of one token of a step in addition to `step`, a number for each of `tensor`."
    )
    rank_multiple: int = Field(ge=1, description="A LoRA rank counts as the next multiple of this number.")
    page_bytes: int = Field(
        ge=1, description="The weights of an adapter take the next multiple of these bytes on each rank."
    )


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
    most_stages: int | None = Field(
        None,
        ge=1,
        le=MAX_LAYERS,
        description="Largest number of pipeline stages that can share the layers; absent: the number of layers.",
    )
    head_layers: float = Field(
        ge=0.0, description="The head's work, in layers: stages are cut so that the slowest is the fastest possible."
    )
    step: StepCosts = Field(description="Memory of the largest step of a rank.")
    adapters: AdapterCosts | None = Field(
        None, description="Memory of LoRA adapters; absent if no adapter can update the model."
    )
    checkpoint_bytes: int = Field(ge=1, description="Bytes of the weights as a folder of safetensors holds them.")


def model_costs(shape: ModelShape, tensor: Sequence[int]) -> Costs:
    """Returns the costs of a model for the numbers of ranks in `tensor`.

    Each number in `tensor` must be one of `shard_counts(shape)`.
    """

    if isinstance(shape, MeasuredShape):
        return _measured_costs(shape, tensor)

    def most(amount_of: Callable[[Shard], Amount]) -> Amounts:
        # The largest shard is the first or the last. The last has the longest part of each uneven matrix, and the first
        # has the biases that are added to a sum over ranks.
        pairs = [(amount_of(Shard(0, n)), amount_of(Shard(n - 1, n))) for n in tensor]
        return Amounts(elements=tuple(max(first[0], last[0]) for first, last in pairs))

    def weights(amount_of: Callable[[ModelShape, Shard], Amount]) -> Amounts:
        found = most(lambda shard: amount_of(dense, shard))
        if shape.scheme is None:
            return found
        pairs = [(amount_of(shape, Shard(0, n)), amount_of(shape, Shard(n - 1, n))) for n in tensor]
        elements, num_bytes = (tuple(max(first[i], last[i]) for first, last in pairs) for i in (0, 1))
        return found.model_copy(update={"kept_elements": elements, "kept_bytes": num_bytes})

    def ends(*, is_first: bool, is_last: bool) -> Amounts:
        return weights(lambda of, shard: ends_amount(of, shard, is_first=is_first, is_last=is_last))

    dense = dataclasses.replace(shape, scheme=None)

    # A kind has layers with equal windows and equally stored matrices. In a file that mixes formats, there may be too
    # many such kinds. Then a kind has all layers with equal windows, and each layer counts as the largest layer of its
    # kind.
    stored: list[Hashable] = list(zip(shape.layer_windows, layer_forms(shape), strict=True))
    of_layers = stored if len(set(stored)) <= _MOST_KINDS else list[Hashable](shape.layer_windows)
    kinds = list(dict.fromkeys(of_layers))
    kv = most(lambda shard: (2 * len(shard.kv_heads(shape.num_kv_heads)) * shape.head_dim, 0))

    def layer_weights(index: int) -> Amounts:
        return weights(lambda of, shard: layer_amount(of, index, shard))

    def layer_kind(kind: Hashable) -> LayerKind:
        examples = {stored[index]: index for index, of_layer in enumerate(of_layers) if of_layer == kind}.values()
        largest = _largest([layer_weights(index) for index in examples])
        return LayerKind(weights=largest, kv=kv, window=shape.layer_windows[of_layers.index(kind)])

    return Costs(
        tensor=tuple(tensor),
        embedding=ends(is_first=True, is_last=False),
        head=ends(is_first=False, is_last=True),
        both=ends(is_first=True, is_last=True),
        kinds=tuple(layer_kind(kind) for kind in kinds),
        layers=run_lengths([kinds.index(kind) for kind in of_layers]),
        head_layers=shape.head_layers,
        step=StepCosts(
            token=Amounts(elements=tuple(step_token_elements(shape, n) for n in tensor)),
            sequence_bytes=step_sequence_bytes(shape),
        ),
        adapters=_adapter_costs(shape, tensor) if can_have_adapters(shape) else None,
        checkpoint_bytes=checkpoint_bytes(shape),
    )


def _adapter_costs(shape: ModelShape, tensor: Sequence[int]) -> AdapterCosts:
    def most(cut_unit: int) -> tuple[int, ...]:
        return tuple(max(layer_elements(shape, Shard(index, n), cut_unit) for index in range(n)) for n in tensor)

    return AdapterCosts(
        layer=Amounts(elements=most(1), kept_elements=None if shape.scheme is None else most(shape.scheme.cut_unit)),
        token_bytes=tuple(adapter_token_bytes(shape, n) for n in tensor),
        rank_multiple=RANK_MULTIPLE,
        page_bytes=PAGE_BYTES,
    )


def _largest(amounts: Sequence[Amounts]) -> Amounts:
    """Returns the element-wise maximum of several parts."""

    def most(lists: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
        known = [numbers for numbers in lists if numbers is not None]
        return tuple(max(column) for column in zip(*known, strict=True)) if known else None

    return Amounts(
        elements=most([amount.elements for amount in amounts]) or (),
        kept_elements=most([amount.kept_elements for amount in amounts]),
        kept_bytes=most([amount.kept_bytes for amount in amounts]),
    )


def _measured_costs(shape: MeasuredShape, tensor: Sequence[int]) -> Costs:
    """Returns the costs of a model of the transformers backend."""
    shares = [shape.share(count) for count in tensor]

    def amounts(elements_of: Callable[[MeasuredShare], int]) -> Amounts:
        return Amounts(elements=tuple(elements_of(share) for share in shares))

    def kv_elements(share: MeasuredShare, index: int) -> int:
        return 2 * math.prod(share.layer_kv_sizes[index])

    stored: list[Hashable] = [
        (window, *((share.layer_parameters[index], share.layer_kv_sizes[index]) for share in shares))
        for index, window in enumerate(shape.layer_windows)
    ]
    # If there are too many kinds for the document, every layer counts as the largest layer.
    of_layers = stored if len(set(stored)) <= len(_LETTERS) else list[Hashable]([None]) * shape.num_layers
    kinds = list(dict.fromkeys(of_layers))

    def layer_kind(kind: Hashable) -> LayerKind:
        layers = [index for index, of_layer in enumerate(of_layers) if of_layer == kind]
        return LayerKind(
            weights=amounts(lambda share: max(share.layer_parameters[index] for index in layers)),
            kv=amounts(lambda share: max(kv_elements(share, index) for index in layers)),
            window=shape.layer_windows[layers[0]] if kind is not None else shape.attention_span,
        )

    return Costs(
        tensor=tuple(tensor),
        embedding=amounts(lambda share: share.embedding_parameters),
        head=amounts(lambda share: share.final_parameters),
        both=amounts(lambda share: share.both_parameters),
        kinds=tuple(map(layer_kind, kinds)),
        layers=run_lengths([kinds.index(kind) for kind in of_layers]),
        most_stages=None if shape.can_be_staged else 1,
        head_layers=shape.head_layers,
        step=StepCosts(
            token=Amounts(elements=tuple(step_token_elements(shape, count) for count in tensor)),
            sequence_bytes=step_sequence_bytes(shape),
        ),
        checkpoint_bytes=shape.weight_bytes(DTYPE_BYTES[shape.checkpoint_dtype]),
    )


def step_token_elements(shape: ModelShape, num_shards: int) -> int:
    """Returns the number of elements that one token of a step takes on a rank, counted from the decoder's code.

    These are the residual stream, its normalised form, the output of attention or MLP, and the inner arrays of
    attention or of the MLP, whichever are larger.
    """
    if isinstance(shape, MeasuredShape):
        share = shape.share(num_shards)
        return 3 * shape.hidden_size + max(3 * share.widest, 2 * share.attention_size)
    feed_forward = 3 * -(-shape.intermediate_size // num_shards) if shape.num_dense_layers else 0
    if shape.experts is not None:
        feed_forward = max(feed_forward, _step_token_elements_of_experts(shape.experts, shape.hidden_size, num_shards))
    attention = 2 * (shape.query_size + shape.kv_size) // num_shards
    return 3 * shape.hidden_size + max(feed_forward, attention)


def _step_token_elements_of_experts(experts: Experts, hidden_size: int, num_shards: int) -> int:
    """Returns the number of elements of one token in a mixture-of-experts MLP.

    These are the input, gate, up, their product and the output of each of the token's experts, and the sum of the
    outputs in float32.
    """
    num_active = experts.num_experts_per_token + experts.num_shared
    inner = experts.active_size(num_shards)
    return num_active * 2 * hidden_size + 3 * inner + 2 * hidden_size


def step_sequence_bytes(shape: ModelShape) -> int:
    """Returns the bytes that one sequence of a step takes on the last stage.

    These are float32 logits, a copy of the logits, and probabilities.
    """
    return 3 * shape.vocab_size * 4


def run_lengths(kinds: Sequence[int]) -> str:
    """Returns `kinds` run-length coded: for each run its length, if above 1, and the letter of its kind (0 is a).

    The text is never longer than `kinds`.
    """
    runs = ((len(list(run)), _LETTERS[kind]) for kind, run in groupby(kinds))
    return "".join(letter if length == 1 else f"{length}{letter}" for length, letter in runs)
