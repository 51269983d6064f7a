"""PackedMemory: the memory of packed weights, in large mappings that the kernel may back with huge pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.cpu_library.huge_mapping import huge_mapping

# A mapping of at least this size holds many matrices, so that huge pages of 2 MiB serve small matrices, too. Pages that
# no matrix has touched take no memory.
_MAPPING_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes of a cache line


class PackedMemory:
    """Allocates arrays in large mappings, and reuses no memory. A mapping is freed with the last array in it."""

    def __init__(self) -> None:
        self._mapping: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._used = 0  # allocated bytes of the present mapping

    def empty(self, num_elements: int, dtype: np.dtype[Any]) -> Array:
        """Returns an array [num_elements] of zeros that begins at a cache line."""
        num_bytes = num_elements * dtype.itemsize
        if self._used + num_bytes > len(self._mapping):
            self._mapping = np.frombuffer(huge_mapping(max(num_bytes, _MAPPING_BYTES)), dtype=np.uint8)
            self._used = 0
        start = self._used
        self._used = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        return self._mapping[start : start + num_bytes].view(dtype)
