"""The process groups of all ranks and of the ranks of one stage: how a process joins and leaves them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed import ProcessGroup as StageGroup  # the ranks that share one stage
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_STEP_SECONDS = 1800.0  # the longest wait of a send or a receive

__all__ = ["Rendezvous", "StageGroup", "interface_towards", "join_group", "leave_group", "open_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A rank's place in a process group, and the store at which the ranks meet."""

    host: str
    port: int
    rank: int
    world_size: int
    ranks_per_stage: int = 1
    device_type: str = "cpu"


def open_store(host: str) -> tuple[TCPStore, int]:
    """A store for one process group, and its port, a free one. Keep the store as long as the group lives.

    Peers reach it at `host`, an address of this machine, and at no other, because a process that reaches a store can
    change it.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_group(rendezvous: Rendezvous, timeout_s: float) -> StageGroup | None:
    """Makes this process a rank of the group that meets at the store; returns when all ranks have come.

    Returns the group of this rank's stage; None for stages of one rank. The group of all ranks is torch's default one.
    Both are NCCL for "cuda", gloo for "cpu". `timeout_s` bounds the meeting. Raises RuntimeError when other ranks do
    not come. After that, or when a rank is lost, call `leave_group` and join again at the port of a new store, because
    a store remembers the ranks of its group.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    # gloo announces to its peers the address that this machine's name resolves to, which peers may not be able to
    # reach, and falls back to loopback where the name does not resolve. The interface towards the store reaches peers.
    given = os.environ.get(_INTERFACE_VARIABLE)
    if given is None and (interface := interface_towards(rendezvous.host)) is not None:
        os.environ[_INTERFACE_VARIABLE] = interface
    try:
        dist.init_process_group(
            "nccl" if rendezvous.device_type == "cuda" else "gloo",
            store=store,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timeout,
        )
    except Exception:
        if not dist.is_initialized():
            # torch numbers its groups, and the number is part of their keys in the store. A failure does not take the
            # number back, and then this process would never find the others of its next group.
            dist.distributed_c10d._world.group_count = 0
        raise
    else:
        stage_group = _stage_group(rendezvous, timeout) if rendezvous.ranks_per_stage > 1 else None
        # A stage waits for as long as the stage before it computes. A lost peer ends the wait at once, and the core
        # ends a peer that hangs, so this limit need not be short.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_STEP_SECONDS))
        return stage_group
    finally:
        if given is None:
            os.environ.pop(_INTERFACE_VARIABLE, None)


def _stage_group(rendezvous: Rendezvous, timeout: timedelta) -> StageGroup:
    """The group of a rank's stage. Every rank makes the groups of all stages, in the same order: torch's rule."""
    size = rendezvous.ranks_per_stage
    firsts = range(0, rendezvous.world_size, size)
    groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts]
    own: StageGroup = groups[rendezvous.rank // size]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_STEP_SECONDS), own)
    return own


def leave_group() -> None:
    """Leaves the process group, if this process is in one. Peers that wait for this rank get an error at once."""
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
