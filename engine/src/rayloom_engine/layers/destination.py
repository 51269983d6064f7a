"""Destination: where the loader copies a tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory for a tensor of the checkpoint.

    `part`: the slices of the tensor that are copied; () means all of it.
    """

    tensor: torch.Tensor
    part: tuple[slice, ...] = ()
