"""The angles of rotary embedding: frequencies are computed once per model, the backend's tables once per step."""

from __future__ import annotations

import math

import torch

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.rotary import RotaryTables
from rayloom_engine.models.shape import RopeParameters

_CHUNK_POSITIONS = 1024  # positions that RotaryTable computes at once


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """Returns the radians per position for each of the head_dim / 2 pairs: float32, fastest first.

    "linear" divides all frequencies by the factor. "llama3" (Llama 3.1, "Llama3 scaling" in Meta's release) keeps the
    frequencies that make many turns within the trained context, divides those that make few turns by the factor, and
    blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # full turns within the trained context
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1.0 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


class RotaryAngles:
    """Makes the rotary tables for given positions, in the form that the rank's rotary kernel needs.

    Tables are computed in each step, in float32: that takes 0.1 ms for 128 tokens, while a table for a 128k context
    would take 64 MB.
    """

    __slots__ = ("_frequencies_h", "_rotary", "_dtype")

    def __init__(self, rope: RopeParameters, head_dim: int, kernels: KernelSet) -> None:
        self._frequencies_h = inverse_frequencies(rope, head_dim).to(kernels.target.device)
        self._rotary = kernels.rotary
        self._dtype = kernels.target.compute_dtype

    def __call__(self, positions_T: torch.Tensor) -> RotaryTables:
        angles_Th = positions_T.to(torch.float32)[:, None] * self._frequencies_h
        return self._rotary.prepare(angles_Th, self._dtype)


class RotaryTable:
    """Float32 cosines and sines of every position, which the C library reads.

    A row depends on its position alone: it is computed in float64 as part of the same chunk of positions in every
    process, then rounded. The table grows with the longest sequence that was computed.
    """

    def __init__(self, rope: RopeParameters, head_dim: int) -> None:
        self._frequencies_h = inverse_frequencies(rope, head_dim)
        self._tables_Ph = (torch.empty(0, head_dim // 2), torch.empty(0, head_dim // 2))

    def rows(self, positions_T: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines [T, h] of positions below `num_positions`."""
        if num_positions > self._tables_Ph[0].shape[0]:
            self._grow(num_positions)
        cosines_Ph, sines_Ph = self._tables_Ph
        return cosines_Ph.index_select(0, positions_T), sines_Ph.index_select(0, positions_T)

    def _grow(self, num_positions: int) -> None:
        begin = self._tables_Ph[0].shape[0]
        end = -(-max(num_positions, 2 * begin) // _CHUNK_POSITIONS) * _CHUNK_POSITIONS
        parts = [self._tables_Ph]
        for first in range(begin, end, _CHUNK_POSITIONS):
            positions = torch.arange(first, first + _CHUNK_POSITIONS, dtype=torch.float32)
            angles = (positions[:, None] * self._frequencies_h).double()
            parts.append((angles.cos().float(), angles.sin().float()))
        cosines, sines = zip(*parts, strict=True)
        self._tables_Ph = (torch.cat(cosines), torch.cat(sines))
