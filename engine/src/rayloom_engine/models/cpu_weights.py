"""The weights of a stage in the form of the C library, and the shapes that the library can compute.

Matrices are packed, norms and biases are float32. A tied embedding and head share one packed matrix. If the layers'
matrices are int8, the embedding is, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rayloom_engine.cpu_library.library import CpuLibrary, dtype_code, linear_of
from rayloom_engine.cpu_library.structures import DecoderStruct, LayerStruct, LinearStruct
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.schemes.dense import DenseScheme, TiedScheme
from rayloom_engine.layers.schemes.int8 import Int8Scheme
from rayloom_engine.models.decoder import DecoderLayer, DecoderWeights
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard

_LANES = 16  # sums that one register holds: kernels compute this many elements at a time
_MAX_HEAD_DIM = 256  # kMaxHeadDim in kv_layout.h
_MAX_GROUP = 48  # query heads of a key/value head: kTileRows in kernels.h
_DTYPES = (torch.float32, torch.bfloat16)


def unsupported(shape: ModelShape, num_shards: int, dtype: torch.dtype, cut_unit: int = 1) -> str:
    """Returns why the library cannot compute a model with weights of this type on `num_shards` ranks; empty if it can.

    `cut_unit`: that of the weights' scheme. The answer is the same for all ranks of a stage, because they sum tensors
    of one type.
    """
    if dtype not in _DTYPES:
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    shards = [Shard(index, num_shards) for index in range(num_shards)]
    sizes = {
        "head_dim": {shape.head_dim},
        "hidden_size": {shape.hidden_size},
        "intermediate_size of a rank": {len(shard.part(shape.intermediate_size, cut_unit)) for shard in shards},
    }
    for name, values in sizes.items():
        if wrong := [value for value in values if value % _LANES]:
            return f"{name} is {wrong[0]}, no multiple of {_LANES}"
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is {shape.head_dim}, more than {_MAX_HEAD_DIM}"
    if (group := shape.num_heads // shape.num_kv_heads) > _MAX_GROUP:
        return f"a key/value head has {group} query heads, more than {_MAX_GROUP}"
    return ""


class CpuWeights:
    """The weights of one stage, in the C library's structures.

    `decoder`: the layers. `embedding`, `final_norm_D` and `head` are None in stages without them.
    """

    def __init__(self, shape: ModelShape, weights: DecoderWeights, library: CpuLibrary, dtype: torch.dtype) -> None:
        self._tensors: list[torch.Tensor] = []  # everything whose addresses the structures hold
        self.num_bytes = weights.num_bytes
        self.embedding: LinearStruct | None = None
        self.final_norm_D: torch.Tensor | None = None
        self.head: LinearStruct | None = None
        if weights.embedding_VD is not None:
            self.embedding = self._embedding(weights.embedding_VD, library, is_int8=_is_int8(weights))
        if weights.final_norm_D is not None:
            self.final_norm_D = weights.final_norm_D.float().clone()
        if weights.head is not None:
            self.head = self._head(weights.head)
        # The structure of the decoder keeps this array alive.
        layers = (LayerStruct * len(weights.layers))(*map(self._layer, weights.layers))
        attention = weights.layers[0].attention
        self.decoder = DecoderStruct(
            dtype=dtype_code(dtype),
            num_layers=len(weights.layers),
            width=shape.hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            intermediate=_matrix(weights.layers[0].mlp.gate_up).packed_NK.shape[0] // 2,
            rms_norm_eps=shape.rms_norm_eps,
            layers=layers,
        )

    def _embedding(self, plain_VD: torch.Tensor, library: CpuLibrary, *, is_int8: bool) -> LinearStruct:
        if not is_int8:
            return self._packed(_Matrix(library.pack(plain_VD), None, None))
        packed_VD, scales_V = library.pack_int8(plain_VD)
        self.num_bytes += packed_VD.nbytes + scales_V.nbytes - plain_VD.nbytes
        return self._packed(_Matrix(packed_VD, scales_V, None))

    def _layer(self, layer: DecoderLayer) -> LayerStruct:
        attention = layer.attention
        return LayerStruct(
            attention_norm=self._vector(layer.attention_norm_D),
            mlp_norm=self._vector(layer.mlp_norm_D),
            q_norm=self._vector(attention.q_norm_d),
            k_norm=self._vector(attention.k_norm_d),
            qkv=self._packed(_matrix(attention.qkv)),
            out=self._packed(_matrix(attention.out)),
            gate_up=self._packed(_matrix(layer.mlp.gate_up)),
            down=self._packed(_matrix(layer.mlp.down)),
            window=attention.window or 0,
        )

    def _head(self, head: Linear) -> LinearStruct:
        if isinstance(head.scheme, TiedScheme):
            assert self.embedding is not None, "a tied head is in the stage of its embedding"
            return self.embedding
        return self._packed(_matrix(head))

    def _packed(self, matrix: _Matrix) -> LinearStruct:
        """Returns the structure of the matrix, and keeps its tensors alive."""
        bias_N = None if matrix.bias_N is None else matrix.bias_N.float().clone()
        kept = (matrix.packed_NK, matrix.scales_N, bias_N)
        self._tensors += [tensor for tensor in kept if tensor is not None]
        return linear_of(matrix.packed_NK, bias_N, matrix.scales_N)

    def _vector(self, vector: torch.Tensor | None) -> int | None:
        """Returns the address of a float32 copy of the vector, and keeps the copy alive."""
        if vector is None:
            return None
        copy = vector.float().clone()
        self._tensors.append(copy)
        return copy.data_ptr()


class _Matrix(NamedTuple):
    packed_NK: torch.Tensor
    scales_N: torch.Tensor | None  # scales of an int8 matrix
    bias_N: torch.Tensor | None


def _matrix(linear: Linear) -> _Matrix:
    scheme = linear.scheme
    if isinstance(scheme, Int8Scheme):
        return _Matrix(scheme.matrix.packed_NK, scheme.matrix.scales_N, scheme.bias)
    assert isinstance(scheme, DenseScheme), "the library multiplies by dense or int8 weights"
    return _Matrix(scheme.weight, None, scheme.bias)


def _is_int8(weights: DecoderWeights) -> bool:
    return isinstance(weights.layers[0].attention.qkv.scheme, Int8Scheme)
