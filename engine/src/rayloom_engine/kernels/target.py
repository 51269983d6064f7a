"""Target: the hardware and the type of arithmetic for which a rank's kernels are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.kernels.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Everything that the choice of a kernel may depend on.

    `backend` restricts the choice. "auto" allows every backend that works here. "plain" allows only torch's public
    operations. "reference" uses the implementations that define the results. It is slower by orders of magnitude, and
    shows whether another kernel is wrong. "triton" demands the Triton kernels, which "auto" chooses on a GPU.
    """

    device: torch.device
    compute_dtype: torch.dtype  # type of activations and dense weights
    backend: Backend = "auto"

    @property
    def dtype_name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")
