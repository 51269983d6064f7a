"""Linear: multiplies activations by weights, whatever the weight scheme."""

from __future__ import annotations

import torch

from rayloom_engine.layers.schemes import WeightScheme


class Linear:
    """Computes [..., out] from [..., in]. Its weight scheme stores the weights and multiplies."""

    __slots__ = ("scheme", "_apply")

    def __init__(self, scheme: WeightScheme) -> None:
        self.scheme = scheme
        self._apply = scheme.apply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)
