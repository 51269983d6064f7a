"""Dense weights: one matrix in the compute type, in the layout that is fastest for the rank's linear kernel."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.linear_spec import LinearSpec


class DenseScheme:
    """Implements WeightScheme with one matrix. Each matrix of the checkpoint is copied into a slice of this matrix."""

    __slots__ = ("weight", "bias", "kernel", "_spec", "_multiply")

    def __init__(self, spec: LinearSpec, kernel: LinearKernel, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.kernel = kernel
        self._spec = spec
        self._multiply = kernel.multiply

    def destinations(self) -> dict[str, Destination]:
        return dense_destinations(self._spec, self.weight, self.bias)

    def finish(self) -> None:
        self.weight = self.kernel.pack(self.weight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        # The size is computed from the elements, because a packed tensor has no `nbytes`.
        return self.weight.numel() * self.weight.element_size() + bias_bytes


def dense_destinations(spec: LinearSpec, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Destination]:
    """Returns tensor name in the checkpoint -> its rows of a plain `weight` and `bias` of the sizes of `spec`."""
    found: dict[str, Destination] = {}
    for name, rows, weight_part, bias_part in spec.stacked():
        found[f"{name}.weight"] = Destination(weight[rows], weight_part)
        if bias is not None:
            found[f"{name}.bias"] = Destination(bias[rows], bias_part)
    return found


class TiedScheme:
    """Implements WeightScheme for a matrix that keeps its plain layout, because the embedding uses it, too."""

    __slots__ = ("weight", "_multiply")

    def __init__(self, weight: torch.Tensor, kernel: LinearKernel) -> None:
        self.weight = weight
        self._multiply = kernel.multiply

    def destinations(self) -> dict[str, Destination]:
        return {}

    def finish(self) -> None:
        pass

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.weight, None)

    @property
    def num_bytes(self) -> int:
        return 0


class DenseSchemes:
    """Implements SchemeFactory for checkpoints whose matrices are not quantised."""

    cut_unit = 1

    def __init__(self, kernel: LinearKernel, dtype: torch.dtype, device: torch.device) -> None:
        self._kernel = kernel
        self._dtype = dtype
        self._device = device

    def linear(self, spec: LinearSpec) -> DenseScheme:
        weight = torch.empty((spec.num_outputs, spec.num_inputs), dtype=self._dtype, device=self._device)
        bias = torch.empty(spec.num_outputs, dtype=self._dtype, device=self._device) if spec.has_bias else None
        return DenseScheme(spec, self._kernel, weight, bias)

    def tied(self, weight: torch.Tensor) -> TiedScheme:
        return TiedScheme(weight, self._kernel)
