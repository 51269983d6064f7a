"""Destination: where the loader copies a tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT_FILE_DTYPES = ("BF16", "F16", "F32")  # types that dense weights may have in a file, by safetensors' names


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory for a tensor of the checkpoint.

    `part`: the slices of the tensor that are copied; () means all of it.
    """

    tensor: torch.Tensor
    part: tuple[slice, ...] = ()
    file_dtypes: tuple[str, ...] = FLOAT_FILE_DTYPES  # types that the tensor may have in the file
