"""Destination: where the loader copies a tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayloom_engine.layers.linear_spec import TensorPart


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory for a tensor of the checkpoint.

    `part`: the slices of the tensor that are copied; () means all of it.
    """

    tensor: torch.Tensor
    part: TensorPart = ()
