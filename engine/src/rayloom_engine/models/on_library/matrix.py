"""Matrix: one matrix of a rank, plain while the checkpoint is read, then packed for the C library.

A packed matrix is dense, or int8: a byte for each weight, a float32 scale for each output, from a dense checkpoint.

    weight[n, k] = scale[n] * w[n, k],  w from -127 to 127,  scale[n] = max over k of |weight[n, k]| / 127

Activations are quantised in each product, with one scale for a group of 32 neighbouring inputs. csrc/cpu/int8.h has the
arithmetic. A shard of a matrix that is cut by columns has scales of its own, from its columns alone.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayloom_engine.config import INT8_GROUP, Quantization
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType, widened
from rayloom_engine.cpu_library.library import CpuLibrary, linear_of
from rayloom_engine.cpu_library.structures import LinearStruct
from rayloom_engine.layers.linear_spec import LinearSpec, TensorPart

_SCALE_BYTES = 4  # of each output of an int8 matrix


@dataclass(frozen=True, slots=True)
class ArrayDestination:
    """The memory for a tensor of the checkpoint.

    `part`: the slices of the tensor that are copied; () means all of it.
    """

    array: Array
    part: TensorPart = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a library stores weights. `dtype`: dense weights, vectors and biases are rounded to it."""

    library: CpuLibrary
    dtype: ElementType
    quantization: Quantization = "none"

    @property
    def cut_unit(self) -> int:
        """Tensor parallelism cuts inputs and outputs at multiples of this number."""
        return 1 if self.quantization == "none" else INT8_GROUP

    @property
    def description(self) -> str:
        """Describes the types of weights, activations and sums, for the log."""
        compute_dtype = self.library.operand_dtype(self.dtype)
        if self.quantization == "int8":
            return (
                f"int8 weights, activations multiplied in int8 in groups of {INT8_GROUP}, all else in {compute_dtype} "
                f"or float32, KV cache in {self.dtype}"
            )
        return f"{self.dtype} weights, activations multiplied in {compute_dtype}, sums in float32"


class Matrix:
    """The plain matrix exists until `finish`, the packed one from then on."""

    __slots__ = ("_bias_N", "_format", "_packed_NK", "_plain_NK", "_scales_N", "_spec", "_wide_bias_N")

    def __init__(self, spec: LinearSpec, form: WeightFormat) -> None:
        is_int8 = form.quantization == "int8"
        assert not is_int8 or spec.num_inputs % INT8_GROUP == 0, f"{spec.num_inputs} inputs cannot be cut into groups"
        elements = ELEMENTS[form.dtype]
        self._spec = spec
        self._format = form
        self._plain_NK: Array | None = np.empty((spec.num_outputs, spec.num_inputs), dtype=elements)
        self._bias_N: Array | None = np.empty(spec.num_outputs, dtype=elements) if spec.has_bias else None
        self._packed_NK: Array | None = None
        self._scales_N: npt.NDArray[np.float32] | None = None
        self._wide_bias_N: npt.NDArray[np.float32] | None = None

    def destinations(self) -> dict[str, ArrayDestination]:
        """Returns tensor name in the checkpoint -> where to copy it. Call it before `finish`."""
        assert self._plain_NK is not None, "finish was called"
        found: dict[str, ArrayDestination] = {}
        for name, rows, weight_part, bias_part in self._spec.stacked():
            found[f"{name}.weight"] = ArrayDestination(self._plain_NK[rows], weight_part)
            if self._bias_N is not None:
                found[f"{name}.bias"] = ArrayDestination(self._bias_N[rows], bias_part)
        return found

    def finish(self) -> None:
        """Packs the matrix and frees the plain one. Called once, when all tensors are copied."""
        assert self._plain_NK is not None, "finish was called before"
        library = self._format.library
        if self._format.quantization == "int8":
            self._packed_NK, self._scales_N = library.pack_int8(self._plain_NK)
        else:
            self._packed_NK = library.pack(self._plain_NK)
        self._plain_NK = None
        self._wide_bias_N = None if self._bias_N is None else widened(self._bias_N)

    @property
    def structure(self) -> LinearStruct:
        """The matrix for the library, as long as this object lives. Available after `finish`."""
        assert self._packed_NK is not None, "finish was not called"
        return linear_of(self._packed_NK, self._wide_bias_N, self._scales_N)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, scales and biases, without the padding of the layout."""
        spec = self._spec
        bias_bytes = 0 if self._bias_N is None else self._bias_N.nbytes
        if self._format.quantization == "int8":
            return spec.num_outputs * (spec.num_inputs + _SCALE_BYTES) + bias_bytes
        return spec.num_outputs * spec.num_inputs * ELEMENTS[self._format.dtype].itemsize + bias_bytes
