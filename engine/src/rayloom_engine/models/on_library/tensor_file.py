"""TensorFile: the tensors of a safetensors file as numpy arrays over a memory mapping, bfloat16 included.

A file begins with the size of its header (8 bytes, little-endian) and the header, a JSON object: tensor name -> type,
sizes, and place in the bytes that follow. numpy has no bfloat16: such tensors are arrays of uint16.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array
from rayloom_engine.layers.linear_spec import TensorPart, slices_of
from rayloom_engine.models.stacked_experts import is_stacked, single_tensors

_SIZE_BYTES = 8
_METADATA = "__metadata__"
_ELEMENTS: dict[str, np.dtype[Any]] = {
    "BF16": ELEMENTS["bfloat16"],
    "F16": np.dtype(np.float16),
    "F32": ELEMENTS["float32"],
    "F8_E4M3": np.dtype(np.uint8),  # numpy has no float8: these are its bits
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
}


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """A file whose header `safetensors.safe_open` has accepted. The mapping lives while any array refers to it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._start = _SIZE_BYTES + int.from_bytes(self._mapping[:_SIZE_BYTES], "little")
        header: dict[str, msgspec.Raw] = msgspec.json.decode(
            self._mapping[_SIZE_BYTES : self._start], type=dict[str, msgspec.Raw]
        )
        self._tensors = {
            name: msgspec.json.decode(entry, type=_Tensor) for name, entry in header.items() if name != _METADATA
        }

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of their bytes."""
        return sorted(self._tensors, key=lambda name: self._tensors[name].data_offsets)

    def read(self, name: str, part: TensorPart = ()) -> Array:
        """Returns the slices `part` of a tensor; (): the whole tensor. The tensor's type is one of those in _ELEMENTS.

        The array is a view of the mapping, so the kernel reads the file when the elements are accessed. If an axis has
        several slices, this method copies them into one array.
        """
        return part_of(self._whole(name), part)

    def views(self, wanted: Container[str]) -> Iterator[tuple[str, Array]]:
        """Yields name and view of the wanted tensors. The parts of a tensor that stacks experts have their own names.

        `wanted` may change meanwhile. Other tensors may have any type, except those that stack experts.
        """
        for name in self.names:
            if is_stacked(name):
                yield from (each for each in single_tensors(name, self._whole(name)) if each[0] in wanted)
            elif name in wanted:
                yield name, self._whole(name)

    def _whole(self, name: str) -> Array:
        tensor = self._tensors[name]
        return np.frombuffer(
            self._mapping,
            dtype=_ELEMENTS[tensor.dtype],
            count=math.prod(tensor.shape),
            offset=self._start + tensor.data_offsets[0],
        ).reshape(tensor.shape)


def part_of(array: Array, part: TensorPart) -> Array:
    """Returns the slices `part` of an array; (): the whole array. It is a view, unless an axis has several slices."""
    if not part:
        return array
    pieces = [array[slices] for slices in slices_of(part)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
