"""Passes numpy arrays to a TensorGroup or a StageLink for torch tensors, without copying the memory.

Legend: T tokens of the step, D model width, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from rayloom_engine.parallel.stage_link import StageLink
from rayloom_engine.parallel.tensor_group import TensorGroup

Array = npt.NDArray[Any]


class NumpyGroup:
    """Implements TensorGroup for numpy arrays."""

    def __init__(self, group: TensorGroup[torch.Tensor]) -> None:
        self._group = group

    def all_reduce(self, part: Array) -> Array:
        return self._group.all_reduce(torch.from_numpy(part)).numpy()

    def gather(self, part: Array) -> Array | None:
        whole_NV = self._group.gather(torch.from_numpy(part))
        return None if whole_NV is None else whole_NV.numpy()


class NumpyLink:
    """Implements StageLink for numpy arrays."""

    def __init__(self, link: StageLink[torch.Tensor]) -> None:
        self._link = link

    def receive(self, num_tokens: int) -> Array:
        return self._link.receive(num_tokens).numpy()

    def send(self, hidden_TD: Array) -> None:
        self._link.send(torch.from_numpy(hidden_TD))
