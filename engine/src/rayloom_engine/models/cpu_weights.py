"""The weights of a stage in the form of the C library, and the shapes that the library can compute.

Matrices are packed, norms and biases are float32. A tied embedding and head share one packed matrix.
"""

from __future__ import annotations

import torch

from rayloom_engine.cpu_library.library import CpuLibrary, dtype_code, linear_of
from rayloom_engine.cpu_library.structures import DecoderStruct, LayerStruct, LinearStruct
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.schemes.dense import DenseScheme, TiedScheme
from rayloom_engine.models.decoder import DecoderLayer, DecoderWeights
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.parallel.shard import Shard

_LANES = 16  # sums that one register holds: kernels compute this many elements at a time
_MAX_HEAD_DIM = 256  # kMaxHeadDim in kv_layout.h
_MAX_GROUP = 48  # query heads of a key/value head: kTileRows in kernels.h
_DTYPES = (torch.float32, torch.bfloat16)


def unsupported(shape: ModelShape, num_shards: int, dtype: torch.dtype) -> str:
    """Returns why the library cannot compute a model with weights of this type on `num_shards` ranks; empty if it can.

    The answer is the same for all ranks of a stage, because they sum tensors of one type.
    """
    if dtype not in _DTYPES:
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}"
    shards = [Shard(index, num_shards) for index in range(num_shards)]
    sizes = {
        "head_dim": {shape.head_dim},
        "hidden_size": {shape.hidden_size},
        "intermediate_size of a rank": {len(shard.part(shape.intermediate_size)) for shard in shards},
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
    """`decoder`: the layers. `embedding`, `final_norm_D` and `head` are None in stages without them."""

    def __init__(self, shape: ModelShape, weights: DecoderWeights, library: CpuLibrary, dtype: torch.dtype) -> None:
        self._tensors: list[torch.Tensor] = []  # everything whose addresses the structures hold
        self.embedding: LinearStruct | None = None
        self.final_norm_D: torch.Tensor | None = None
        self.head: LinearStruct | None = None
        if weights.embedding_VD is not None:
            self._tensors.append(library.pack(weights.embedding_VD))
            self.embedding = linear_of(self._tensors[-1], None)
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
            intermediate=_dense(weights.layers[0].mlp.gate_up).weight.shape[0] // 2,
            rms_norm_eps=shape.rms_norm_eps,
            layers=layers,
        )

    def _layer(self, layer: DecoderLayer) -> LayerStruct:
        attention = layer.attention
        return LayerStruct(
            attention_norm=self._vector(layer.attention_norm_D),
            mlp_norm=self._vector(layer.mlp_norm_D),
            q_norm=self._vector(attention.q_norm_d),
            k_norm=self._vector(attention.k_norm_d),
            qkv=self._linear(attention.qkv),
            out=self._linear(attention.out),
            gate_up=self._linear(layer.mlp.gate_up),
            down=self._linear(layer.mlp.down),
            window=attention.window or 0,
        )

    def _head(self, head: Linear) -> LinearStruct:
        if isinstance(head.scheme, TiedScheme):
            assert self.embedding is not None, "a tied head is in the stage of its embedding"
            return self.embedding
        return self._linear(head)

    def _linear(self, linear: Linear) -> LinearStruct:
        scheme = _dense(linear)
        bias = None if scheme.bias is None else scheme.bias.float().clone()
        self._tensors += [scheme.weight] if bias is None else [scheme.weight, bias]
        return linear_of(scheme.weight, bias)

    def _vector(self, vector: torch.Tensor | None) -> int | None:
        """Returns the address of a float32 copy."""
        if vector is None:
            return None
        copy = vector.float().clone()
        self._tensors.append(copy)
        return copy.data_ptr()


def _dense(linear: Linear) -> DenseScheme:
    assert isinstance(linear.scheme, DenseScheme), "the library multiplies by dense weights"
    return linear.scheme
