"""Destination: where a tensor of a checkpoint belongs in a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT_FILE_DTYPES = ("BF16", "F16", "F32")  # safetensors' names of the types that dense weights may have in a file


@dataclass(frozen=True, slots=True)
class Destination:
    """The memory that a tensor of the checkpoint is copied to, or `part` of that tensor; () means all of it."""

    tensor: torch.Tensor
    part: tuple[slice, ...] = ()
    file_dtypes: tuple[str, ...] = FLOAT_FILE_DTYPES  # types that the file may have
