"""Matrix: one matrix of a rank, plain while the checkpoint is read, then packed for the C library.

A packed matrix is dense, int8, or grouped (cpu_library/grouped.py). Grouped is the form for a checkpoint's quantised
weights. An int8 matrix is made from dense weights. It has a byte for each weight, and a float32 scale for each output:

    weight[n, k] = scale[n] * w[n, k],  w from -127 to 127,  scale[n] = max over k of |weight[n, k]| / 127

Activations are quantised in each product, with one scale for a group of 32 neighbouring inputs. csrc/cpu/int8.h has the
arithmetic. If a matrix is cut by columns, each shard has scales of its own, computed from its columns alone.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import pointer
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayloom_engine.config import INT8_GROUP, Quantization
from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType, copy_elements, widened
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights, MatrixVectors, RowPart, stacked
from rayloom_engine.cpu_library.library import CpuLibrary, grouped_linear_of, linear_of
from rayloom_engine.cpu_library.structures import LinearStruct
from rayloom_engine.layers.linear_spec import LinearSpec, StackedRows, TensorPart
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.quantised.reader import MatrixReader
from rayloom_engine.models.quantised.scheme import CheckpointScheme, FormRows

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
    """The form in which the C library stores weights. Dense weights, vectors and biases are rounded to `dtype`.

    `scheme`: how the checkpoint is quantised. With the setting `quantization` auto, quantised matrices keep this
    scheme. With none, these matrices become dense. With int8, these matrices become dense and are then quantised to
    int8.
    """

    library: CpuLibrary
    dtype: ElementType
    quantization: Quantization = "none"
    scheme: CheckpointScheme | None = None

    @property
    def kept_scheme(self) -> CheckpointScheme | None:
        """The checkpoint's scheme, if matrices keep it, else None."""
        return self.scheme if self.quantization == "auto" else None

    @property
    def cut_unit(self) -> int:
        """Tensor parallelism cuts inputs and outputs at multiples of this number."""
        if self.kept_scheme is not None:
            return self.kept_scheme.cut_unit
        return INT8_GROUP if self.quantization == "int8" else 1

    @property
    def label(self) -> str:
        """Names the quantisation of the weights in memory, for the status: none, int8, or the checkpoint's scheme."""
        if self.quantization == "int8":
            return "int8"
        return "none" if self.kept_scheme is None else self.kept_scheme.label

    @property
    def description(self) -> str:
        """Describes the types of weights, activations and sums, for the log."""
        compute_dtype = self.library.operand_dtype(self.dtype)
        if self.label != "none":
            return (
                f"{self.label} weights, activations multiplied in int8 in groups of {INT8_GROUP}, all else in "
                f"{compute_dtype} or float32, KV cache in {self.dtype}"
            )
        return f"{self.dtype} weights, activations multiplied in {compute_dtype}, sums in float32"


@dataclass(slots=True)
class _StoredMatrix:
    """The tensors of a quantised matrix of the checkpoint. The matrix becomes some rows of the packed matrix."""

    place: StackedRows
    reader: MatrixReader
    tensors: dict[str, Array]

    @property
    def part(self) -> tuple[RowPart, slice]:
        """The rows and columns of the checkpoint's matrix that this rank holds."""
        rows, columns = (*self.place.weight_part, slice(None), slice(None))[:2]
        assert isinstance(columns, slice), "only the rows have several slices"
        return np.r_[rows] if isinstance(rows, tuple) else rows, columns


class GroupedRows(NamedTuple):
    """Rows of a matrix that are packed in one form."""

    form: GroupedForm
    num_rows: int
    packed: npt.NDArray[np.uint8]
    factors_N: npt.NDArray[np.float32] | None


class Matrix:
    """One matrix. It holds tensors of the checkpoint or a plain matrix until `finish`, then the packed matrix."""

    __slots__ = (
        "_bias_N",
        "_format",
        "_forms",
        "_grouped",
        "_packed_NK",
        "_plain_NK",
        "_scales_N",
        "_spec",
        "_stored",
        "_structures",
        "_wide_bias_N",
    )

    def __init__(self, spec: LinearSpec, form: WeightFormat) -> None:
        is_int8 = form.quantization == "int8"
        assert not is_int8 or spec.num_inputs % INT8_GROUP == 0, f"{spec.num_inputs} inputs cannot be cut into groups"
        elements = ELEMENTS[form.dtype]
        self._spec = spec
        self._format = form
        self._forms: tuple[FormRows, ...] | None = None if form.kept_scheme is None else form.kept_scheme.forms(spec)
        self._grouped: list[GroupedRows] = []
        self._structures: list[LinearStruct] = []  # of the forms, the last form first
        self._stored = [] if form.scheme is None else list(_stored_matrices(spec, form.scheme))
        self._plain_NK: Array | None = None
        if len(self._stored) < len(spec.outputs):
            self._plain_NK = np.empty((spec.num_outputs, spec.num_inputs), dtype=elements)
        self._bias_N: Array | None = np.empty(spec.num_outputs, dtype=elements) if spec.has_bias else None
        self._packed_NK: Array | None = None
        self._scales_N: npt.NDArray[np.float32] | None = None
        self._wide_bias_N: npt.NDArray[np.float32] | None = None

    def destinations(self) -> dict[str, ArrayDestination]:
        """Returns tensor name in the checkpoint -> where to copy it. Call it before `finish`."""
        assert self._packed_NK is None and not self._grouped, "finish was called"
        stored = {each.place.name: each.tensors for each in self._stored}
        found: dict[str, ArrayDestination] = {}
        for name, rows, weight_part, bias_part in self._spec.stacked():
            if name in stored:
                found.update((f"{name}.{suffix}", ArrayDestination(array)) for suffix, array in stored[name].items())
            else:
                assert self._plain_NK is not None, name
                found[f"{name}.weight"] = ArrayDestination(self._plain_NK[rows], weight_part)
            if self._bias_N is not None:
                found[f"{name}.bias"] = ArrayDestination(self._bias_N[rows], bias_part)
        return found

    def finish(self) -> None:
        """Packs the matrix and frees the tensors that were read. Called once, when all tensors are copied.

        Raises ModelError for a quantised matrix whose tensors contradict each other.
        """
        assert self._packed_NK is None and not self._grouped, "finish was called before"
        library = self._format.library
        if self._forms is not None:
            self._pack_grouped(self._forms)
        else:
            plain_NK = self._dense()
            if self._format.quantization == "int8":
                self._packed_NK, self._scales_N = library.pack_int8(plain_NK)
            else:
                self._packed_NK = library.pack(plain_NK)
        self._plain_NK = None
        self._stored = []
        self._wide_bias_N = None if self._bias_N is None else widened(self._bias_N)

    @property
    def structure(self) -> LinearStruct:
        """The matrix as a structure of the library, valid as long as this object lives. Available after `finish`."""
        if self._forms is not None:
            return self._grouped_structure()
        assert self._packed_NK is not None, "finish was not called"
        return linear_of(self._packed_NK, self._wide_bias_N, self._scales_N)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, scales and biases, without rows of padding."""
        spec = self._spec
        bias_bytes = 0 if self._bias_N is None else self._bias_N.nbytes
        if self._forms is not None:
            return sum(form.num_bytes(num_rows, spec.num_inputs) for form, num_rows in self._forms) + bias_bytes
        if self._format.quantization == "int8":
            return spec.num_outputs * (spec.num_inputs + _SCALE_BYTES) + bias_bytes
        return spec.num_outputs * spec.num_inputs * ELEMENTS[self._format.dtype].itemsize + bias_bytes

    def _pack_grouped(self, forms: tuple[FormRows, ...]) -> None:
        stored = iter(self._stored)
        for form, num_rows in forms:
            parts: list[GroupedWeights] = []
            while sum(len(part.integers_NK) for part in parts) < num_rows:
                each = next(stored)
                with refuses_broken(each.place.name):
                    parts.append(self._packed_part(each, form))
                each.tensors = {}
            weights = stacked(parts)
            factors_N = None if weights.factors_N is None else np.ascontiguousarray(weights.factors_N)
            self._grouped.append(GroupedRows(form, num_rows, self._format.library.pack_grouped(weights), factors_N))

    def _packed_part(self, stored: _StoredMatrix, form: GroupedForm) -> GroupedWeights:
        """Returns this rank's part of a matrix in `form`.

        Raises ValueError for another number of inputs, because the library would read behind the packed weights.
        """
        weights = stored.reader.packed(stored.tensors).part(*stored.part).in_form(form)
        num_inputs = weights.integers_NK.shape[1]
        if num_inputs != self._spec.num_inputs:
            raise ValueError(f"the blocks have {num_inputs} inputs, and the matrix has {self._spec.num_inputs}")
        return weights

    def _grouped_structure(self) -> LinearStruct:
        """Returns the structure of the first form's rows, which refers to the structures of the other rows."""
        assert self._grouped, "finish was not called"
        if self._structures:
            return self._structures[-1]
        end = self._spec.num_outputs
        for rows in reversed(self._grouped):
            bias_N = None if self._wide_bias_N is None else self._wide_bias_N[end - rows.num_rows : end]
            end -= rows.num_rows
            vectors = MatrixVectors(bias_N, rows.factors_N)
            structure = grouped_linear_of(rows.packed, rows.form, (rows.num_rows, self._spec.num_inputs), vectors)
            if self._structures:
                structure.more = pointer(self._structures[-1])
            self._structures.append(structure)  # keeps alive what `more` points to
        return self._structures[-1]

    def _dense(self) -> Array:
        """Returns the plain matrix. Weights that are quantised in the checkpoint are dequantised."""
        if self._plain_NK is None:
            shape = (self._spec.num_outputs, self._spec.num_inputs)
            self._plain_NK = np.empty(shape, dtype=ELEMENTS[self._format.dtype])
        for each in self._stored:
            with refuses_broken(each.place.name):
                copy_elements(self._plain_NK[each.place.rows], each.reader.plain(each.tensors)[each.part])
            each.tensors = {}
        return self._plain_NK


def _stored_matrices(spec: LinearSpec, scheme: CheckpointScheme) -> Iterator[_StoredMatrix]:
    """Returns the quantised matrices among the stacked matrices, with memory for their tensors."""
    for place in spec.stacked():
        reader = scheme.reader(place.name)
        if reader is not None:
            headers = reader.tensors(spec.outputs[place.name].size, spec.inputs.size)
            tensors: dict[str, Array] = {
                suffix: np.empty(header.sizes, dtype=header.held) for suffix, header in headers.items()
            }
            yield _StoredMatrix(place, reader, tensors)
