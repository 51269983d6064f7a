"""A linear layer that owns its weight in the form that this machine multiplies fastest."""

from __future__ import annotations

import torch

from rayloom_engine.kernels.linear import LinearMethod, linear, pack_weight


class Linear:
    """weight [out, in], bias [out] or None. `pack` may be called once, after the weight is filled."""

    __slots__ = ("bias", "uses_onednn", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.uses_onednn = False

    def pack(self, method: LinearMethod, *, keeps_layout: bool = False) -> None:
        """Goes over to `method`. With `keeps_layout` the weight stays plain, for a matrix that has a second user."""
        if not method.uses_onednn:
            return
        if not keeps_layout:
            self.weight = pack_weight(self.weight)
        self.uses_onednn = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, uses_onednn=self.uses_onednn)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias; a packed weight counts as its plain size, which it exceeds by little padding."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.weight.numel() * self.weight.element_size() + bias_bytes
