"""SafetensorsWriter: writes a safetensors file piece by piece, so that a checkpoint never has to fit into memory.

Format: 8 bytes with the header's length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import numpy as np

DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor of the file. `is_bytes`: it has bytes (U8) instead of numbers of the file's type."""

    name: str
    shape: tuple[int, ...]
    is_bytes: bool = False


class SafetensorsWriter:
    """Use as a context manager. Write the tensors' values in the order of `specs`, row-major, in pieces of any size."""

    def __init__(self, file: IO[bytes], specs: Sequence[TensorSpec], dtype: str) -> None:
        """`dtype`: one of DTYPE_NAMES, for all tensors except those of bytes."""
        self._file = file
        self._dtype = dtype
        self.num_written = 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in specs:
            end = offset + math.prod(spec.shape) * (1 if spec.is_bytes else _ELEMENT_BYTES[dtype])
            stored = "U8" if spec.is_bytes else DTYPE_NAMES[dtype]
            header[spec.name] = {"dtype": stored, "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        self.num_bytes = offset
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # pad, because the data must start at a multiple of 8
        file.write(len(text).to_bytes(8, "little") + text)

    def write(self, values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Appends float32 values, rounded to the file's type: to the nearest value, ties to even."""
        if self._dtype == "bfloat16":
            data = _bfloat16_bits(values)
        else:
            data = np.ascontiguousarray(values.astype(self._dtype, copy=False))
        self._file.write(data.data)
        self.num_written += data.nbytes

    def write_bytes(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Appends bytes of a tensor of bytes."""
        self._file.write(np.ascontiguousarray(values).data)
        self.num_written += values.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert self.num_written == self.num_bytes, (self.num_written, self.num_bytes)


def _bfloat16_bits(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, Any]:
    """Returns the upper 16 bits of the float32 values, rounded.

    Weights are finite, so rounding cannot carry into infinity.
    """
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return (bits >> 16).astype(np.uint16)
