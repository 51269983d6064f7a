"""RotaryTable: float32 cosines and sines of rotary embedding for every position, which the C library reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.models.rope.frequencies import attention_scale, inverse_frequencies
from rayloom_engine.models.rope.parameters import RopeParameters

_CHUNK_POSITIONS = 1024  # positions that are computed at once

FloatArray = npt.NDArray[np.float32]


class RotaryTable:
    """Tables of cosines and sines with a row for each position. They grow with the longest sequence computed so far.

    A row depends only on its position, because every process computes it as part of the same chunk of positions. Angles
    are float32. Their cosines and sines are computed in float64, multiplied by the embedding's scale, and rounded.
    """

    def __init__(self, rope: RopeParameters, head_dim: int) -> None:
        self._frequencies_h = inverse_frequencies(rope, head_dim)
        self._scale = attention_scale(rope)
        empty = np.empty((0, len(self._frequencies_h)), dtype=np.float32)
        self._tables_Ph: tuple[FloatArray, FloatArray] = (empty, empty)

    def rows(self, positions_T: npt.NDArray[np.int64], num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Returns the cosines and sines [T, h] of `positions_T`, which are all below `num_positions`."""
        if num_positions > len(self._tables_Ph[0]):
            self._grow(num_positions)
        cosines_Ph, sines_Ph = self._tables_Ph
        return cosines_Ph.take(positions_T, axis=0), sines_Ph.take(positions_T, axis=0)

    def _grow(self, num_positions: int) -> None:
        begin = len(self._tables_Ph[0])
        end = -(-max(num_positions, 2 * begin) // _CHUNK_POSITIONS) * _CHUNK_POSITIONS
        parts = [self._tables_Ph]
        for first in range(begin, end, _CHUNK_POSITIONS):
            positions = np.arange(first, first + _CHUNK_POSITIONS, dtype=np.float32)
            angles = (positions[:, None] * self._frequencies_h).astype(np.float64)
            tables = (np.cos(angles) * self._scale, np.sin(angles) * self._scale)
            parts.append((tables[0].astype(np.float32), tables[1].astype(np.float32)))
        cosines, sines = zip(*parts, strict=True)
        self._tables_Ph = (np.concatenate(cosines), np.concatenate(sines))
