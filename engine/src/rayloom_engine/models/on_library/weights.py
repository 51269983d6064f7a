"""The weights of a stage, or of a shard of it, in the form of the C library.

Matrices are packed; norms, biases and sinks are float32. A tied embedding and head share one packed matrix. If the
layers' matrices are int8, the embedding is int8, too.
"""

from __future__ import annotations

from ctypes import pointer
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, address, widened
from rayloom_engine.cpu_library.library import dtype_code
from rayloom_engine.cpu_library.structures import (
    ACTIVATION_CODES,
    ActivationStruct,
    DecoderStruct,
    ExpertsStruct,
    LayerStruct,
    LinearStruct,
)
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.models.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, VectorSpec
from rayloom_engine.models.on_library.matrix import ArrayDestination, Matrix, WeightFormat
from rayloom_engine.models.shape import ModelShape


class PlainWeights:
    """Memory for all tensors of a rank. The loader calls `finish` of each of `matrices` once its tensors are copied.

    `destinations`: tensor name in the checkpoint -> where to copy the tensor. The loader empties this dict. Otherwise
    the dict would keep the plain matrices alive next to their packed copies.
    """

    def __init__(self, spec: DecoderSpec, form: WeightFormat) -> None:
        self.spec = spec
        self.form = form
        self.destinations: dict[str, ArrayDestination] = {}
        self.matrices: list[Matrix] = []
        self.vectors: dict[str, Array] = {}  # by name in the checkpoint, in the weights' type
        self.embedding = None if spec.embedding is None else self._matrix(spec.embedding)
        self.layers = [self._layer(layer) for layer in spec.layers]
        if spec.final_norm is not None:
            self._vector(spec.final_norm)
        self.head = self.embedding if spec.is_tied else None
        if spec.head is not None:
            self.head = self._matrix(spec.head)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights once they are packed."""
        return sum(each.num_bytes for each in self.matrices) + sum(each.nbytes for each in self.vectors.values())

    def _layer(self, layer: LayerSpec) -> list[Matrix]:
        """Returns the matrices of LayerSpec.linears."""
        for vector in layer.vectors:
            self._vector(vector)
        router = layer.mlp.router if isinstance(layer.mlp, ExpertsSpec) else None
        return [self._matrix(linear, is_dense=linear is router) for linear in layer.linears]

    def _matrix(self, spec: LinearSpec, *, is_dense: bool = False) -> Matrix:
        """Returns a matrix. With `is_dense`, the matrix is dense even if the format quantises matrices."""
        matrix = Matrix(spec, replace(self.form, quantization="none") if is_dense else self.form)
        self.matrices.append(matrix)
        self.destinations.update(matrix.destinations())
        return matrix

    def _vector(self, spec: VectorSpec) -> None:
        array = np.empty(spec.size, dtype=ELEMENTS[self.form.dtype])
        self.vectors[spec.name] = array
        self.destinations[spec.name] = ArrayDestination(array, spec.part)


class LibraryWeights:
    """The weights of one stage, in the C library's structures.

    `decoder`: the layers. `embedding`, `final_norm_D` and `head` are None in stages without them.
    """

    def __init__(self, plain: PlainWeights, shape: ModelShape) -> None:
        """`plain`: its tensors are loaded, and its matrices finished."""
        spec = plain.spec
        # Matrices and vectors are kept alive here, because the structures hold their addresses.
        self._matrices = plain.matrices
        sinks = {layer.sinks.name for layer in spec.layers if layer.sinks is not None}  # all other vectors are norms
        offset = np.float32(shape.traits.norm_offset)
        self._vectors = {
            name: widened(vector) if name in sinks else widened(vector) + offset
            for name, vector in plain.vectors.items()
        }
        self.num_bytes = plain.num_bytes
        self.embedding: LinearStruct | None = None if plain.embedding is None else plain.embedding.structure
        self.head: LinearStruct | None = None if plain.head is None else plain.head.structure
        self.final_norm_D: npt.NDArray[np.float32] | None = None
        if spec.final_norm is not None:
            self.final_norm_D = self._vectors[spec.final_norm.name]
        # The structure of the decoder keeps this array alive.
        layers = (LayerStruct * len(spec.layers))(
            *(self._layer(layer, matrices) for layer, matrices in zip(spec.layers, plain.layers, strict=True))
        )
        first = spec.layers[0]
        mlps = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)]
        self.decoder = DecoderStruct(
            dtype=dtype_code(plain.form.dtype),
            num_layers=len(spec.layers),
            width=first.qkv.num_inputs,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rotary_dim=shape.rope.rotary_dim(first.head_dim),
            intermediate=max((mlp.gate_up.num_outputs // 2 for mlp in mlps), default=0),
            activation=ActivationStruct(
                kind=ACTIVATION_CODES[shape.traits.activation],
                slope=shape.traits.gate_slope,
                limit=shape.traits.gate_limit,
            ),
            has_wide_norms=int(shape.traits.has_wide_qk_norm),
            residual_scale=shape.traits.residual_scale,
            score_scale=shape.score_scale,
            score_cap=shape.traits.score_cap or 0.0,
            rms_norm_eps=shape.rms_norm_eps,
            layers=layers,
        )

    def _layer(self, spec: LayerSpec, matrices: list[Matrix]) -> LayerStruct:
        qkv, out, *of_mlp = matrices
        mlp = _mlp_fields(spec.mlp, of_mlp)
        return LayerStruct(
            attention_norm=self._address(spec.attention_norm),
            attention_output_norm=self._address(spec.attention_output_norm),
            mlp_norm=self._address(spec.mlp_norm),
            mlp_output_norm=self._address(spec.mlp_output_norm),
            q_norm=self._address(spec.q_norm),
            k_norm=self._address(spec.k_norm),
            sinks=self._address(spec.sinks),
            qkv=qkv.structure,
            out=out.structure,
            window=spec.window or 0,
            **mlp,
        )

    def _address(self, spec: VectorSpec | None) -> int | None:
        return None if spec is None else address(self._vectors[spec.name])


def _mlp_fields(spec: MlpSpec | ExpertsSpec, matrices: list[Matrix]) -> dict[str, Any]:
    """Returns the fields of a LayerStruct that describe the MLP. `matrices`: those of `spec.linears`."""
    if isinstance(spec, MlpSpec):
        gate_up, down = matrices
        return {"gate_up": gate_up.structure, "down": down.structure}
    router, *of_experts = (matrix.structure for matrix in matrices)
    count = len(spec.experts)
    experts = ExpertsStruct(
        router=router,
        gate_up=(LinearStruct * count)(*of_experts[::2]),
        down=(LinearStruct * count)(*of_experts[1::2]),
        num_experts=spec.routing.num_experts,
        num_per_token=spec.routing.num_experts_per_token,
        num_shared=spec.routing.num_shared,
        normalises=int(spec.routing.normalises_weights),
    )
    return {"experts": pointer(experts)}  # the pointer keeps the structure alive
