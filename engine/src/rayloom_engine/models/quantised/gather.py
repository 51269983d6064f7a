"""QuantisedTensors: collects the tensors of quantised matrices in any order, and returns each complete matrix."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import Array
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.quantised.reader import MatrixReader
from rayloom_engine.models.quantised.scheme import CheckpointScheme


class QuantisedTensors:
    """Collects the tensors of each matrix until they are complete, then dequantises the matrix.

    `sizes`: pairs (name, (outputs, inputs)) of the matrices that the model needs, as dense matrices.
    """

    def __init__(self, scheme: CheckpointScheme | None, sizes: Iterable[tuple[str, tuple[int, int]]]) -> None:
        self._owners: dict[str, tuple[str, str]] = {}  # tensor -> matrix, suffix
        self._readers: dict[str, MatrixReader] = {}
        self._missing: dict[str, int] = {}
        self._tensors: dict[str, dict[str, Array]] = {}
        for matrix, (num_outputs, num_inputs) in sizes:
            reader = None if scheme is None else scheme.reader(matrix)
            if reader is None:
                continue
            headers = reader.tensors(num_outputs, num_inputs)
            self._readers[matrix] = reader
            self._missing[matrix] = len(headers)
            self._tensors[matrix] = {
                suffix: np.empty(header.sizes, dtype=header.held) for suffix, header in headers.items()
            }
            self._owners.update((f"{matrix}.{suffix}", (matrix, suffix)) for suffix in headers)

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._owners

    def add(self, tensor: str, values: Array) -> tuple[str, npt.NDArray[np.float32]] | None:
        """Adds a tensor. Returns the plain matrix that it completes, as (name, weights); None if tensors are missing.

        Raises ModelError if the tensors of a matrix contradict each other.
        """
        matrix, suffix = self._owners[tensor]
        held = self._tensors[matrix][suffix]
        held[...] = values.reshape(held.shape)
        self._missing[matrix] -= 1
        if self._missing[matrix]:
            return None
        with refuses_broken(matrix):
            return matrix, self._readers[matrix].plain(self._tensors.pop(matrix))
