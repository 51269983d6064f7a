"""TensorGroup over torch.distributed: gloo or NCCL, as the process group was made."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F


class ProcessTensorGroup:
    """Implements TensorGroup. Raises RuntimeError when a rank of the stage is gone.

    Drop it before the process leaves the group: as long as it lives the connections do, and peers wait on.
    """

    def __init__(self, group: dist.ProcessGroup, widths: tuple[int, ...]) -> None:
        """`widths` are the columns of logits that each rank of the group has."""
        self._group = group
        self._widths = widths
        self._is_first = dist.get_rank(group) == 0

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part, group=self._group)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        # Only equal parts can be gathered, so narrow ones are filled up for the way.
        sent = F.pad(part, (0, max(self._widths) - part.shape[1])) if len(set(self._widths)) > 1 else part
        parts = [torch.empty_like(sent) for _ in self._widths] if self._is_first else None
        dist.gather(sent, parts, group=self._group, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=True)], dim=1)
