"""Linear: multiplies activations by weights, whatever the weight scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from rayloom_engine.layers.schemes import WeightScheme
from rayloom_engine.layers.schemes.dense import DenseScheme

Product = Callable[[torch.Tensor], torch.Tensor]
ProductT = TypeVar("ProductT", bound=Product)


class Linear:
    """Computes [..., out] from [..., in]. Its weight scheme stores the weights and multiplies."""

    __slots__ = ("scheme", "_apply")

    def __init__(self, scheme: WeightScheme) -> None:
        self.scheme = scheme
        self._apply: Product = scheme.apply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)

    @property
    def matrix(self) -> torch.Tensor | None:
        """The matrix [out, in] if the output is x times this dense matrix and no more: no bias and no adapters."""
        scheme = self.scheme
        if isinstance(scheme, DenseScheme) and scheme.bias is None and self._apply == scheme.apply:
            return scheme.weight
        return None

    def replace_product(self, make: Callable[[Product], ProductT]) -> ProductT:
        """Replaces f, the function that multiplies, by `make(f)`. Returns the new function."""
        product = make(self._apply)
        self._apply = product
        return product
