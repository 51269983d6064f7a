"""The weights of a stage, or of a shard of it, in the form of the C library.

Matrices are packed, norms and biases are float32. A tied embedding and head share one packed matrix. If the layers'
matrices are int8, the embedding is, too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, address, widened
from rayloom_engine.cpu_library.library import dtype_code
from rayloom_engine.cpu_library.structures import ACTIVATION_CODES, DecoderStruct, LayerStruct, LinearStruct
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.models.decoder_spec import DecoderSpec, LayerSpec, VectorSpec
from rayloom_engine.models.on_library.matrix import ArrayDestination, Matrix, WeightFormat
from rayloom_engine.models.shape import ModelShape


class PlainWeights:
    """Memory for all tensors of a rank. `matrices` have to be finished once their tensors are copied.

    `destinations`: tensor name in the checkpoint -> where to copy it. Whoever copies empties it, because it keeps the
    plain matrices alive next to their packed copies.
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
        return [self._matrix(linear) for linear in layer.linears]

    def _matrix(self, spec: LinearSpec) -> Matrix:
        matrix = Matrix(spec, self.form)
        self.matrices.append(matrix)
        self.destinations.update(matrix.destinations())
        return matrix

    def _vector(self, spec: VectorSpec) -> None:
        array = np.empty(spec.size, dtype=ELEMENTS[self.form.dtype])
        self.vectors[spec.name] = array
        self.destinations[spec.name] = ArrayDestination(array)


class LibraryWeights:
    """The weights of one stage, in the C library's structures.

    `decoder`: the layers. `embedding`, `final_norm_D` and `head` are None in stages without them.
    """

    def __init__(self, plain: PlainWeights, shape: ModelShape) -> None:
        """`plain`: loaded, with all matrices finished."""
        spec = plain.spec
        # Everything whose addresses the structures hold.
        self._matrices = plain.matrices
        offset = np.float32(shape.traits.norm_offset)
        self._vectors = {name: widened(vector) + offset for name, vector in plain.vectors.items()}  # all are norms
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
        self.decoder = DecoderStruct(
            dtype=dtype_code(plain.form.dtype),
            num_layers=len(spec.layers),
            width=first.qkv.num_inputs,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rotary_dim=shape.rope.rotary_dim(first.head_dim),
            intermediate=first.dense_mlp.gate_up.num_outputs // 2,
            activation=ACTIVATION_CODES[shape.traits.activation],
            has_wide_norms=int(shape.traits.has_wide_qk_norm),
            residual_scale=shape.traits.residual_scale,
            score_scale=shape.score_scale,
            score_cap=shape.traits.score_cap or 0.0,
            rms_norm_eps=shape.rms_norm_eps,
            layers=layers,
        )

    def _layer(self, spec: LayerSpec, matrices: list[Matrix]) -> LayerStruct:
        qkv, out, gate_up, down = matrices
        return LayerStruct(
            attention_norm=self._address(spec.attention_norm),
            attention_output_norm=self._address(spec.attention_output_norm),
            mlp_norm=self._address(spec.mlp_norm),
            mlp_output_norm=self._address(spec.mlp_output_norm),
            q_norm=self._address(spec.q_norm),
            k_norm=self._address(spec.k_norm),
            qkv=qkv.structure,
            out=out.structure,
            gate_up=gate_up.structure,
            down=down.structure,
            window=spec.window or 0,
        )

    def _address(self, spec: VectorSpec | None) -> int | None:
        return None if spec is None else address(self._vectors[spec.name])
