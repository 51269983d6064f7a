"""The memory of a rank's quantised weights, in parts, as `models.costs` needs it. Pure.

An amount is a pair: the number of weights in the type in which a rank computes, and the bytes of packed weights.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.models.decoder_spec import DecoderSpec, VectorSpec, checkpoint_sizes, decoder_spec
from rayloom_engine.models.quantised.reader import FLOATS
from rayloom_engine.models.quantised.scheme import matrix_amounts
from rayloom_engine.models.shape import DTYPE_BYTES, ModelShape
from rayloom_engine.parallel.model_part import ModelPart, whole_part
from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import Stage

Amount = tuple[int, int]


def layer_forms(shape: ModelShape) -> list[Hashable]:
    """Returns how the matrices of each layer are stored. Layers with equal forms and windows need the same memory."""
    scheme = shape.scheme
    if scheme is None:
        return [shape.experts_of(layer) for layer in range(shape.num_layers)]
    spec = decoder_spec(shape, whole_part(shape.num_layers))
    return [tuple(scheme.forms(linear) for linear in layer.linears) for layer in spec.layers]


def layer_amount(shape: ModelShape, index: int, shard: Shard) -> Amount:
    """Returns the weights of one layer."""
    layer = _spec(shape, Stage(1, 3, range(index, index + 1)), shard).layers[0]
    return _sum(shape, layer.linears, layer.vectors)


def ends_amount(shape: ModelShape, shard: Shard, *, is_first: bool, is_last: bool) -> Amount:
    """Returns the weights that a stage has beside its layers."""
    stage = Stage(0, 1 if is_last else 2, range(1)) if is_first else Stage(1, 2, range(1))
    spec = _spec(shape, stage, shard)
    matrices = (matrix for matrix in (spec.embedding, spec.head) if matrix is not None)
    return _sum(shape, matrices, () if spec.final_norm is None else (spec.final_norm,))


def weight_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Returns the bytes of all weights on one rank, with `element_bytes` for a weight that is not quantised."""
    if shape.scheme is None:
        return shape.weight_bytes(element_bytes)
    elements, packed = whole_amount(shape)
    return elements * element_bytes + packed


def whole_amount(shape: ModelShape) -> Amount:
    """Returns all weights of the model on one rank."""
    spec = decoder_spec(shape, whole_part(shape.num_layers))
    ends = ends_amount(shape, WHOLE, is_first=True, is_last=True)
    parts = [ends, *(_sum(shape, layer.linears, layer.vectors) for layer in spec.layers)]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def checkpoint_bytes(shape: ModelShape) -> int:
    """Returns the bytes of the weights in a folder of safetensors files, computed from the shape's type and scheme.

    Weights of a GGUF file count as dense, because the setting `dtype`, if it is set, makes them dense.
    """
    element_bytes = DTYPE_BYTES[shape.checkpoint_dtype]
    if shape.scheme is None or shape.scheme.by_name:
        return shape.weight_bytes(element_bytes)
    headers = shape.scheme.tensors(checkpoint_sizes(shape)).values()
    return sum(
        math.prod(header.sizes) * (element_bytes if header.types == FLOATS else header.held.itemsize)
        for header in headers
    )


def _spec(shape: ModelShape, stage: Stage, shard: Shard) -> DecoderSpec:
    unit = 1 if shape.scheme is None else shape.scheme.cut_unit
    return decoder_spec(shape, ModelPart(stage, shard), unit)


def _sum(shape: ModelShape, matrices: Iterable[LinearSpec], vectors: Iterable[VectorSpec]) -> Amount:
    amounts = [matrix_amounts(matrix, shape.scheme) for matrix in matrices]
    elements = sum(amount[0] for amount in amounts) + sum(vector.size for vector in vectors)
    return elements, sum(amount[1] for amount in amounts)
