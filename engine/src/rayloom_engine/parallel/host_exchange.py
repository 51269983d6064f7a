"""Passes GPU tensors through host memory to a TensorGroup or a StageLink for CPU tensors (setting ranks_per_gpu).

Ranks that share a GPU need it, because NCCL refuses two ranks on one GPU.

Legend: T tokens of the step, D model width, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch

from rayloom_engine.parallel.stage_link import StageLink
from rayloom_engine.parallel.tensor_group import TensorGroup


class HostGroup:
    """Implements TensorGroup for tensors on a device."""

    def __init__(self, group: TensorGroup[torch.Tensor]) -> None:
        """`group`: gets contiguous CPU tensors."""
        self._group = group

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        total = self._group.all_reduce(_host_copy(part))
        # The device copies while this thread continues. Later work of the device comes after the copy, and torch does
        # not reuse pinned memory before a copy from it has ended.
        return part.copy_(total, non_blocking=True)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        whole_NV = self._group.gather(_host_copy(part))
        return None if whole_NV is None else whole_NV.to(part.device)


class HostLink:
    """Implements StageLink for tensors on a device."""

    def __init__(self, link: StageLink[torch.Tensor], device_type: str) -> None:
        """`link`: sends and receives CPU tensors. It keeps a sent tensor alive until the tensor is sent."""
        self._link = link
        self._device = torch.device(device_type)

    def receive(self, num_tokens: int) -> torch.Tensor:
        return self._link.receive(num_tokens).to(self._device)

    def send(self, hidden_TD: torch.Tensor) -> None:
        self._link.send(_host_copy(hidden_TD))


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy in host memory, after the device has computed the tensor and has copied it."""
    # A GPU's driver copies to other memory than pinned memory in two steps.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)
