"""RotaryTable: float32 cosines and sines of rotary embedding for every position, which the C library reads."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rayloom_engine.models.shape import RopeParameters

_CHUNK_POSITIONS = 1024  # positions that are computed at once

FloatArray = npt.NDArray[np.float32]


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> FloatArray:
    """Returns the radians per position for each of the head_dim / 2 pairs: float32, fastest first.

    The same rules as in models/rope.py, for torch. Powers are computed in float64 and rounded, where torch computes
    them in float32: a frequency may differ in its last bit.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = (1.0 / powers).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        turns = np.float32(rope.original_max_position) * frequencies / np.float32(2 * math.pi)
        width = np.float32(rope.high_freq_factor - rope.low_freq_factor)
        blend = ((turns - np.float32(rope.low_freq_factor)) / width).clip(0.0, 1.0)
        scaled = (np.float32(1.0) - blend) * frequencies / np.float32(rope.factor) + blend * frequencies
        return scaled.astype(np.float32, copy=False)
    return frequencies


class RotaryTable:
    """A row depends on its position alone: it is computed in float64 as part of the same chunk of positions in every
    process, then rounded. The table grows with the longest sequence that was computed.
    """

    def __init__(self, rope: RopeParameters, head_dim: int) -> None:
        self._frequencies_h = inverse_frequencies(rope, head_dim)
        empty = np.empty((0, head_dim // 2), dtype=np.float32)
        self._tables_Ph: tuple[FloatArray, FloatArray] = (empty, empty)

    def rows(self, positions_T: npt.NDArray[np.int64], num_positions: int) -> tuple[FloatArray, FloatArray]:
        """Returns cosines and sines [T, h] of positions below `num_positions`."""
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
            parts.append((np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)))
        cosines, sines = zip(*parts, strict=True)
        self._tables_Ph = (np.concatenate(cosines), np.concatenate(sines))
