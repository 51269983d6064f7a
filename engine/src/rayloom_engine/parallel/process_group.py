"""Joins and leaves torch's process groups: the group of all ranks, and the group of the ranks of one stage."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup as StageGroup  # the ranks that share one stage

from rayloom_engine.parallel.backend import Backend
from rayloom_engine.parallel.gloo_connections import Store, find_connections, socket_inodes
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.parallel.nccl_groups import NcclGroups, keep_process_after_errors

logger = logging.getLogger(__name__)

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
# Longest wait for a peer in a step. A stage waits as long as the previous stage computes. This limit need not be short:
# the loss of a peer ends the wait at once, and the core aborts the wait for a hung peer.
STEP_LIMIT = timedelta(seconds=1800)

__all__ = ["Rendezvous", "StageGroup", "interface_towards", "join_group", "leave_group", "open_store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A rank's number in a process group, and the address of the store through which the ranks find each other."""

    host: str
    port: int
    rank: int
    world_size: int
    ranks_per_stage: int = 1
    backend: Backend = "gloo"


def open_store(host: str) -> tuple[TCPStore, int]:
    """Opens a store for one process group. Returns the store and its port. Keep the store as long as the group exists.

    The store listens only at `host`, this machine's address, because any process that reaches the store can change it.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_group(rendezvous: Rendezvous, timeout_s: float, group_abort: GroupAbort) -> StageGroup | None:
    """Makes this process a rank of a new process group, and waits until all ranks have joined.

    Adds the waits in the new groups to `group_abort`.

    Returns the group of this rank's stage, or None if stages have one rank. The group of all ranks becomes torch's
    default group. Both groups have the same backend. Raises RuntimeError if other ranks do not join within `timeout_s`.
    After such an error, or after the loss of a rank, call `leave_group` and join with a new store, because a store
    remembers the ranks of its group.
    """
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)
    # By default, gloo sends its peers the address to which this machine's name resolves; loopback if it has no address.
    # Peers may be unable to reach that address, so use the interface through which this machine reaches the store.
    given = os.environ.get(_INTERFACE_VARIABLE)
    if given is None and (interface := interface_towards(rendezvous.host)) is not None:
        os.environ[_INTERFACE_VARIABLE] = interface
    is_nccl = rendezvous.backend == "nccl"
    if is_nccl:
        keep_process_after_errors()
    earlier = socket_inodes()
    try:
        dist.init_process_group(
            rendezvous.backend,
            store=store,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=timeout,
        )
    except Exception:
        if not dist.is_initialized():
            # torch counts its groups, and a group's keys in the store contain the count. A failed join does not reset
            # the count. With the wrong count, this process would look for the other ranks of its next group under wrong
            # keys.
            dist.distributed_c10d._world.group_count = 0
        raise
    else:
        stage_group = _stage_group(rendezvous, timeout) if rendezvous.ranks_per_stage > 1 else None
        if is_nccl:
            group_abort.add(NcclGroups([group for group in (dist.group.WORLD, stage_group) if group is not None]))
        else:
            _add_connections(rendezvous, earlier, PrefixStore("rayloom", store), group_abort)
        dist.distributed_c10d._set_pg_timeout(STEP_LIMIT)
        return stage_group
    finally:
        if given is None:
            os.environ.pop(_INTERFACE_VARIABLE, None)


def _add_connections(rendezvous: Rendezvous, earlier: dict[int, str], store: Store, group_abort: GroupAbort) -> None:
    connections = find_connections(earlier, store, rendezvous.rank, rendezvous.world_size)
    group_abort.add(connections)
    num_expected = rendezvous.world_size + rendezvous.ranks_per_stage - 2  # one to each peer in each of the two groups
    if len(connections) < num_expected:
        logger.warning(
            "rank %d can end its waits in %d of its %d connections to other ranks; if a rank hangs, this one may be "
            "replaced as well",
            rendezvous.rank,
            len(connections),
            num_expected,
        )


def _stage_group(rendezvous: Rendezvous, timeout: timedelta) -> StageGroup:
    """Makes the groups of all stages, and returns this rank's group. All ranks must make them in the same order."""
    size = rendezvous.ranks_per_stage
    firsts = range(0, rendezvous.world_size, size)
    groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts]
    own: StageGroup = groups[rendezvous.rank // size]
    dist.distributed_c10d._set_pg_timeout(STEP_LIMIT, own)
    return own


def leave_group() -> None:
    """Leaves the process group, if this process has joined one. Peers that wait for this rank get an error at once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def interface_towards(host: str) -> str | None:
    """Returns the name of the network interface that this machine uses to reach `host`; None if it is not found."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # only chooses a route: a datagram socket sends nothing
            local = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == local for entry in addresses):
            return name
    return None
