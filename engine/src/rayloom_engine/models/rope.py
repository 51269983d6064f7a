"""The angles of rotary embedding: frequencies are computed once per model, the backend's tables once per step."""

from __future__ import annotations

import math

import torch

from rayloom_engine.kernels.kernel_set import KernelSet
from rayloom_engine.kernels.rotary import RotaryTables
from rayloom_engine.models.shape import RopeParameters


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
