"""Reads a GGUF file's metadata and tensors. Work and memory are bounded by the size of the file.

Layout (ggml-org/ggml, docs/gguf.md), little-endian: magic, version, number of tensors, number of metadata entries, the
entries (name, type, value), the tensors' descriptions, then, from the next multiple of the alignment, their data. A
string is its length and its bytes; an array is its element type, its length and its elements. Counts come from the file
and may be wrong. So before a loop, the reader compares the loop's count with the remaining bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import refuses_broken

Kind: TypeAlias = gguf.GGMLQuantizationType

_VERSIONS = (2, 3)
_ALIGNMENT = 32  # alignment of files without general.alignment
_MAX_HEADER_BYTES = 512 << 20
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_ELEMENTS = 1 << 23  # elements of all arrays together; a tokenizer of 256,000 tokens has 1.3 million
_MAX_DIMENSIONS = 2
# The fewest bytes of a metadata entry (empty name, type, one byte) and of a tensor's description (empty name, one size,
# type, offset).
_ENTRY_BYTES = 8 + 4 + 1
_DESCRIPTION_BYTES = 8 + 4 + 8 + 4 + 8
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_DATA_TYPES = {Kind.F16: "<f2", Kind.F32: "<f4", Kind.F64: "<f8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor whose data is completely in the file.

    `sizes` begin with the fastest-varying dimension, unlike in torch and numpy. The first dimension of `data` counts
    rows. A row holds numbers, or bytes if the type is quantised.
    """

    name: str
    kind: Kind
    sizes: tuple[int, ...]  # one or two
    data: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    path: Path
    fields: dict[str, Any]  # numbers, texts, flags, and lists of one of these
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Returns the file's metadata and tensors. Tensor data is memory-mapped, not read.

    Raises ModelError that names file and field.
    """
    with refuses_broken(path):
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is not a usable GGUF file: it is empty")
        reader = _Reader(path, np.memmap(path, mode="r", dtype=np.uint8))
        return reader.read()


class _Reader:
    def __init__(self, path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._offset = 0
        self._num_elements = 0

    def read(self) -> GgufFile:
        if self._take(4, "the magic") != b"GGUF":
            raise self._broken("it does not begin with GGUF")
        version = self._integer("<I", "version")
        if version not in _VERSIONS:
            raise self._broken(f"version {version}; works: {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian")
        num_tensors = self._integer("<Q", "the number of tensors")
        num_entries = self._integer("<Q", "the number of metadata entries")
        self._check_count("metadata entries", num_entries, _MAX_ENTRIES, _ENTRY_BYTES)
        self._check_count("tensors", num_tensors, _MAX_TENSORS, _DESCRIPTION_BYTES)
        fields: dict[str, Any] = {}
        for _ in range(num_entries):
            name = self._text("the name of a metadata entry")
            if name in fields:
                raise self._broken(f"{shown(name)} is there twice")
            fields[name] = self._value(self._integer("<I", shown(name)), name)
        descriptions = [self._description() for _ in range(num_tensors)]
        start = self._data_start(fields.get("general.alignment", _ALIGNMENT))
        tensors: dict[str, GgufTensor] = {}
        for name, kind, sizes, offset in descriptions:
            if name in tensors:
                raise self._broken(f"the tensor {shown(name)} is there twice")
            tensors[name] = self._tensor(name, kind, sizes, start + offset)
        return GgufFile(path=self._path, fields=fields, tensors=tensors)

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._text(name)
        if kind == _ARRAY:
            return self._array(name)
        return self._scalars(kind, 1, name)[0]

    def _array(self, name: str) -> list[Any]:
        kind = self._integer("<I", shown(name))
        count = self._integer("<Q", shown(name))
        if kind == _ARRAY:
            raise self._broken(f"{shown(name)} is an array of arrays, which no model's metadata needs")
        self._num_elements += count
        if self._num_elements > _MAX_ELEMENTS:
            raise self._broken(f"its arrays have more than {_MAX_ELEMENTS} elements, with {shown(name)}")
        if kind != _STRING:
            return self._scalars(kind, count, name)
        self._check_count(f"strings of {shown(name)}", count, _MAX_ELEMENTS, 8)
        return [self._text(name) for _ in range(count)]

    def _scalars(self, kind: int, count: int, name: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self._broken(f"{shown(name)} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize, shown(name)), dtype).tolist()
        return values

    def _description(self) -> tuple[str, Kind, tuple[int, ...], int]:
        name = self._text("the name of a tensor")
        label = f"the tensor {shown(name)}"
        num_dimensions = self._integer("<I", label)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._broken(f"{label} has {num_dimensions} dimensions; works: 1 and {_MAX_DIMENSIONS}")
        sizes = tuple(self._integer("<Q", label) for _ in range(num_dimensions))
        if 0 in sizes:
            raise self._broken(f"{label} has the sizes {list(sizes)}; none may be 0")
        number = self._integer("<I", label)
        try:
            kind = Kind(number)
        except ValueError as error:
            raise self._broken(f"{label} has the unknown type {number}") from error
        return name, kind, sizes, self._integer("<Q", label)

    def _data_start(self, alignment: object) -> int:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) != 0:
            raise self._broken(f"general.alignment {shown(alignment)} is not a power of two")
        return -(-self._offset // alignment) * alignment

    def _tensor(self, name: str, kind: Kind, sizes: tuple[int, ...], start: int) -> GgufTensor:
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if sizes[0] % block_values != 0:
            raise self._broken(
                f"the tensor {shown(name)} has rows of {sizes[0]} values, and {kind.name} needs a multiple of "
                f"{block_values}"
            )
        num_bytes = math.prod(sizes) // block_values * block_bytes
        if start + num_bytes > self._size:
            raise self._broken(
                f"the tensor {shown(name)} ends at byte {start + num_bytes}, and the file has {self._size}; "
                "download it again"
            )
        dtype = _DATA_TYPES.get(kind, "<u1")
        data = self._data[start : start + num_bytes].view(dtype)
        rows = sizes[1:]  # empty for a vector, so its data has one dimension
        return GgufTensor(name=name, kind=kind, sizes=sizes, data=data.reshape(*rows, -1))

    def _check_count(self, of: str, count: int, limit: int, least_bytes: int) -> None:
        if count > limit or count * least_bytes > self._size - self._offset:
            raise self._broken(
                f"it claims {count} {of}; there is room for {(self._size - self._offset) // least_bytes}, "
                f"and up to {limit} work"
            )

    def _text(self, name: str) -> str:
        data = self._take(self._integer("<Q", name), name)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"{shown(name)} is not UTF-8 text") from error

    def _integer(self, form: str, name: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form), name))[0]
        return number

    def _take(self, num_bytes: int, name: str) -> bytes:
        end = self._offset + num_bytes
        if end > min(self._size, _MAX_HEADER_BYTES):
            raise self._broken(f"it ends within {name}, which claims {num_bytes} bytes; download it again")
        taken = self._data[self._offset : end].tobytes()
        self._offset = end
        return taken

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is not a usable GGUF file: {why}")
