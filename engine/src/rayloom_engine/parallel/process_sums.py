"""A TensorGroup over torch.distributed, with the backend of the process group: gloo or NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rayloom_engine.parallel.process_group import StageGroup


class ProcessTensorGroup:
    """Implements TensorGroup. Raises RuntimeError if a rank of the stage is gone.

    Drop this object before the process leaves the group. While the object exists, the group's connections stay open.
    Then peers do not notice that the process has left, and keep waiting.
    """

    def __init__(self, group: StageGroup, widths: tuple[int, ...]) -> None:
        """`widths`: for each rank of the group, the number of columns of logits that it computes."""
        self._group = group
        self._widths = widths
        self._is_first = dist.get_rank(group) == 0

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=self._group)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        # torch can only gather parts of equal size, so narrower parts are padded for the transfer.
        sent = F.pad(part, (0, max(self._widths) - part.shape[1])) if len(set(self._widths)) > 1 else part
        parts = [torch.empty_like(sent) for _ in self._widths] if self._is_first else None
        dist.gather(sent, parts, group=self._group, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
