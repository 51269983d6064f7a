"""How hidden states cross from one pipeline stage to the next, and the process groups of all ranks and of a stage.

Legend: T tokens of the step, D model width.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from datetime import timedelta
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_STEP_SECONDS = 1800.0  # a send or receive may wait for so long


class StageLink(Protocol):
    """A stage's ends of the way to its neighbours. The first stage only sends, the last one only receives."""

    def receive(self, num_tokens: int) -> torch.Tensor:
        """The hidden states [T, D] of the stage before; the caller may overwrite them. Blocks until they are there."""

    def send(self, hidden_TD: torch.Tensor) -> None:
        """Hands hidden states to the stage after; returns before it has taken them. The caller never changes them."""


class ProcessGroupLink:
    """A link over the process group that this process has joined. Raises RuntimeError when a neighbour is gone."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        previous_rank: int,
        next_rank: int,
        depth: int,
    ) -> None:
        """The neighbours are the ranks of the same shard in the stages before and after. Nobody asks the ends for more.

        `dtype` is the compute type: the residual stream crosses unrounded. `depth` is the number of plans in flight:
        one more is there only when the last stage has done the oldest, so no send is waited for while all goes well.
        """
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._previous_rank = previous_rank
        self._next_rank = next_rank
        self._depth = depth
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()  # the tensors live until they have left

    def receive(self, num_tokens: int) -> torch.Tensor:
        hidden_TD = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        dist.recv(hidden_TD, src=self._previous_rank)
        return hidden_TD

    def send(self, hidden_TD: torch.Tensor) -> None:
        if len(self._sent) == self._depth:
            self._sent[0][0].wait()
            self._sent.popleft()
        work = dist.isend(hidden_TD, dst=self._next_rank)
        assert work is not None, "this process is not in the group"
        self._sent.append((work, hidden_TD))


def open_store(host: str) -> tuple[TCPStore, int]:
    """A store for one process group, and its port, a free one. Keep it as long as the group lives.

    Peers reach it at `host`, an address of this machine, and at no other: whoever reaches a store can change it.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    ranks_per_stage: int = 1,
    device_type: str = "cpu",
) -> dist.ProcessGroup | None:
    """Makes this process a rank of the group that meets at the store at host:port; returns when all have come.

    Returns the group of this rank's stage; None for stages of one rank. The group of all is torch's default one. Both
    are NCCL for "cuda", gloo for "cpu". `timeout_s` bounds the meeting. Raises RuntimeError when the others do not
    come. After that, or when a rank is lost, call `leave_group` and join again at the port of a new store, because a
    store remembers the ranks of its group.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    # gloo tells its peers the address that this machine's name resolves to, which need not be one that they can reach;
    # and it falls back to loopback when there is none. What leads to the store leads to the peers.
    given = os.environ.get(_INTERFACE_VARIABLE)
    if given is None and (interface := interface_towards(host)) is not None:
        os.environ[_INTERFACE_VARIABLE] = interface
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except Exception:
        if not dist.is_initialized():
            # torch numbers its groups, and the number is part of their keys in the store. A failure does not take the
            # number back, and then this process would never find the others of its next group.
            dist.distributed_c10d._world.group_count = 0
        raise
    else:
        stage_group = _stage_group(rank, world_size, ranks_per_stage, timeout) if ranks_per_stage > 1 else None
        # A stage waits for as long as the one before it computes. A peer that is gone ends the wait at once, and one
        # that hangs is ended by others, so this limit need not be short.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_STEP_SECONDS))
        return stage_group
    finally:
        if given is None:
            os.environ.pop(_INTERFACE_VARIABLE, None)


def _stage_group(rank: int, world_size: int, ranks_per_stage: int, timeout: timedelta) -> dist.ProcessGroup:
    """The group of a rank's stage. Every rank makes the groups of all stages, in the same order: torch's rule."""
    firsts = range(0, world_size, ranks_per_stage)
    groups = [dist.new_group(list(range(first, first + ranks_per_stage)), timeout=timeout) for first in firsts]
    own: dist.ProcessGroup = groups[rank // ranks_per_stage]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_STEP_SECONDS), own)
    return own


def leave_group() -> None:
    """Ends this process's part in the group, if it has one. Peers that wait for it get an error at once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_towards(host: str) -> str | None:
    """The network interface that packets to `host` leave by; None when no route or no name of it is found."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses a route; a datagram socket sends nothing for it
            local = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == local for entry in addresses):
            return name
    return None
