"""A StageLink over torch.distributed, with the backend of the process group: gloo or NCCL.

Legend: T tokens of the step, D model width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayloom_engine.parallel.process_group import STEP_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """The form of the tensors that a link sends. `dtype` is RankModel.hidden_dtype, so nothing is rounded."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, hidden_size: int, dtype: str, device_type: str) -> HiddenStates:
        """Returns the form. `dtype`: the name of a type, such as "bfloat16"."""
        return cls(hidden_size=hidden_size, dtype=getattr(torch, dtype), device=torch.device(device_type))


class ProcessGroupLink:
    """A link over the process group that this process has joined. Raises RuntimeError if a neighbour is gone."""

    def __init__(self, form: HiddenStates, *, previous_rank: int, next_rank: int, depth: int) -> None:
        """`previous_rank`, `next_rank`: ranks of the same shard in the neighbour stages; unused without such a stage.

        `depth`: limit of plans in flight, and so of unfinished sends. At this limit, the core makes no further plan
        until the last stage has finished the oldest plan. So a send waits for an earlier send only if a stage is late.
        """
        self._form = form
        self._previous_rank = previous_rank
        self._next_rank = next_rank
        self._depth = depth
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()  # keeps the tensors alive until they are sent

    def receive(self, num_tokens: int) -> torch.Tensor:
        form = self._form
        hidden_TD = torch.empty((num_tokens, form.hidden_size), dtype=form.dtype, device=form.device)
        self._wait(dist.irecv(hidden_TD, src=self._previous_rank))
        return hidden_TD

    def send(self, hidden_TD: torch.Tensor) -> None:
        if len(self._sent) == self._depth:
            self._wait(self._sent[0][0])
            self._sent.popleft()
        work = dist.isend(hidden_TD, dst=self._next_rank)
        assert work is not None, "this process is not in the group"
        self._sent.append((work, hidden_TD))

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "this process is not in the group"
        if self._form.device.type == "cpu":
            # Without an argument, gloo uses the limit of the rendezvous, which `_set_pg_timeout` does not change.
            work.wait(STEP_LIMIT)
        else:
            work.wait()  # with a limit, NCCL would block this thread until the tensor is there
