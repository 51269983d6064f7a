"""A TensorGroup for ranks on one machine. Each rank adds the parts of all ranks, in order, from shared memory.

Every rank has a memory file with two slots for its parts, used alternately, and a pipe from each peer. In an exchange,
a rank writes its part into a slot, sends one byte to every peer, and reads one byte from every peer. Then all parts are
in memory. The kernel's lock of a pipe orders memory accesses, so a rank that has read a peer's byte sees the peer's
part. A rank overwrites a slot two exchanges later. In the exchange in between, the rank has read a byte from each peer.
A peer sends this byte only after it has read the slot, so no peer still reads the slot. A rank blocks in the read
instead of spinning, because there may be more ranks than cores.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
from io import FileIO
from typing import Any

import torch
import torch.distributed as dist

from rayloom_engine.parallel.backend import Backend
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.parallel.process_group import StageGroup
from rayloom_engine.parallel.process_sums import ProcessTensorGroup
from rayloom_engine.parallel.tensor_group import TensorGroup
from rayloom_engine.protocol.unnamed_files import make_memory_file, make_pipe, open_memory_file, open_pipe

logger = logging.getLogger(__name__)

_SLOT_BYTES = 4 * 1024 * 1024  # larger parts are summed in pieces of this size; Linux allocates only the pages in use
_MAX_MESSAGE_BYTES = 4096
_ARRIVED = b"\0"  # a peer's part is in its memory
_ABORTED = b"\1"  # written by this process itself


def make_tensor_group(
    stage_group: StageGroup, widths: tuple[int, ...], backend: Backend, group_abort: GroupAbort
) -> TensorGroup[torch.Tensor]:
    """Returns the fastest TensorGroup for the ranks of a stage: NCCL, else shared memory on one host, else gloo.

    Every rank of the stage must call it at the same time. `widths`: as for ProcessTensorGroup. `backend`: of the
    process group. Adds the waits of sums in shared memory to `group_abort`.
    """
    if backend == "gloo":
        try:
            group = SharedTensorGroup(stage_group, widths)
            group_abort.add(group)
            return group
        except OSError as error:
            logger.info("the ranks of this stage sum over gloo, not in shared memory: %s", error)
    return ProcessTensorGroup(stage_group, widths)


class SharedTensorGroup(ProcessTensorGroup):
    """Implements TensorGroup and PeerWaits. Raises RuntimeError if a rank of the stage is gone.

    Parts must be contiguous.
    """

    def __init__(self, group: StageGroup, widths: tuple[int, ...]) -> None:
        """Every rank of the group must call this at the same time. Raises OSError either on all ranks or on none."""
        super().__init__(group, widths)
        self._turn = 0
        # Held while the pipes are closed, and while `abort` opens a pipe again by its descriptor's number. A closed
        # pipe's number may belong to another file.
        self._closing = threading.Lock()
        rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        inboxes: list[FileIO | None] = []
        offer: list[Any]
        try:
            file, name = make_memory_file(2 * _SLOT_BYTES)
            inboxes = [None if peer == rank else make_pipe("r") for peer in range(size)]
            offer = [os.getpid(), file.fileno(), name, [-1 if pipe is None else pipe.fileno() for pipe in inboxes]]
        except OSError as error:
            inboxes = []
            offer = [str(error)]
        offers = _all_gather(group, offer)
        self._inboxes: list[FileIO] = [pipe for pipe in inboxes if pipe is not None]
        self._outboxes: list[FileIO] = []
        self._memories: list[torch.Tensor] = []  # by rank: the bytes of the rank's memory file
        problem = ""
        try:
            for peer, offered in enumerate(offers):
                if len(offered) == 1:
                    raise OSError(offered[0])
                pid, memory_fd, name, pipe_fds = offered
                with open_memory_file(pid, memory_fd, name) as opened:
                    memory = mmap.mmap(opened.fileno(), 2 * _SLOT_BYTES)
                self._memories.append(torch.frombuffer(memory, dtype=torch.uint8))
                if peer != rank:
                    self._outboxes.append(open_pipe(pid, pipe_fds[rank], "w"))
        except OSError as error:
            problem = str(error)
        problems = [given for given in _all_gather(group, problem) if given]
        if problems:
            raise OSError(problems[0])
        self._rank = rank
        self._slots: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}  # (turn, dtype) -> the slot of each rank

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        for piece in torch.split(part.view(-1), _SLOT_BYTES // part.element_size()):
            first, second, *others = self._exchange(piece, [piece.numel()] * len(self._memories))
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        num_rows = part.shape[0]
        if num_rows * max(self._widths) * part.element_size() > _SLOT_BYTES:
            return super().gather(part)
        parts = self._exchange(part.reshape(-1), [num_rows * width for width in self._widths])
        return torch.cat([each.view(num_rows, -1) for each in parts], dim=1) if self._is_first else None

    def abort(self) -> None:
        """Writes a byte into the pipes that this rank reads, because closing a pipe does not wake its reader."""
        with self._closing:
            for inbox in self._inboxes:
                if not inbox.closed:
                    with open_pipe(os.getpid(), inbox.fileno(), "w", os.O_NONBLOCK) as writer:
                        writer.write(_ABORTED)

    def release(self) -> None:
        """Does nothing: the pipes are closed with this object."""

    def _exchange(self, part: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Exchanges parts with all peers. Returns every rank's part; the parts are overwritten two exchanges later.

        `counts`: for each rank, the number of elements of its part.
        """
        self._turn ^= 1
        slots = self._slots.get((self._turn, part.dtype))
        if slots is None:  # cached, because making the views takes a third of the time of a small sum
            begin = self._turn * _SLOT_BYTES
            slots = [memory[begin : begin + _SLOT_BYTES].view(part.dtype) for memory in self._memories]
            self._slots[self._turn, part.dtype] = slots
        parts = [slot[:count] for slot, count in zip(slots, counts, strict=True)]
        parts[self._rank].copy_(part)
        try:
            for outbox in self._outboxes:
                outbox.write(_ARRIVED)
            for inbox in self._inboxes:
                if (received := inbox.read(1)) != _ARRIVED:
                    raise ConnectionError("the step was aborted" if received == _ABORTED else "connection closed")
        except (OSError, ValueError) as error:  # ValueError: the pipes were closed here by an earlier failure
            # A third rank may wait for this rank's byte, which will never come. Closing the pipes ends that wait.
            with self._closing:
                for pipe in (*self._outboxes, *self._inboxes):
                    pipe.close()
            raise RuntimeError(f"a rank of this stage is gone ({error})") from error
        return parts


def _all_gather(group: StageGroup, value: object) -> list[Any]:
    """Exchanges a value as JSON. Returns the value of each rank of the group, in the order of ranks.

    torch's own exchange of objects uses pickle. Unpickling could run a peer's code, and peers are not authenticated
    here.
    """
    message = torch.frombuffer(bytearray(json.dumps(value).encode().ljust(_MAX_MESSAGE_BYTES)), dtype=torch.uint8)
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, message, group=group)
    return [json.loads(bytes(part.tolist())) for part in parts]
