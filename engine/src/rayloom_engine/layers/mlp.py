"""The gated MLP of a layer, with gate and up fused into one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.gated_linear import GatedLinear
from rayloom_engine.kernels.silu_mul import SiluMul as GateMul
from rayloom_engine.layers.linear import Linear


@dataclass(slots=True, kw_only=True)
class GatedMlp:
    gate_up: Linear  # rows: gate, then up
    down: Linear
    gate_mul: GateMul  # activation of gate and up
    gated_linear: GatedLinear | None = None  # product and activation in one operation, for a dense matrix

    def __call__(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Returns [T, D], this rank's part of the sum over ranks."""
        if self.gated_linear is not None and (matrix := self.gate_up.matrix) is not None:
            return self.down(self.gated_linear(hidden_TD, matrix))
        return self.down(self.gate_mul(self.gate_up(hidden_TD)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.gate_up, self.down)
