"""GlooConnections: the TCP connections of a process's gloo groups, which can be shut down while gloo waits for a peer.

torch's gloo has no abort. After `abort`, `shutdown` or `destroy_process_group`, a thread in a collective or a receive
still waits until its time-out (measured with torch 2.13 and a time-out of 20 s). If a connection is shut down instead,
gloo reports it as closed by the peer, and the wait raises RuntimeError within a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from typing import Protocol

Ends = tuple[str, int, str, int]  # host and port here, host and port of the peer


class Store(Protocol):
    """The methods of torch's store with which ranks exchange the ends of their connections."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class GlooConnections:
    """Implements PeerWaits for all connections that gloo has opened to other ranks."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        """`sockets`: duplicates (`dup`) of gloo's sockets; they stay valid when gloo closes its own descriptors."""
        self._sockets = sockets

    def __len__(self) -> int:
        return len(self._sockets)

    def abort(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # the peer has closed the connection
                connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the duplicates. Without this, peers would not see that gloo has closed the connections."""
        for connection in self._sockets:
            connection.close()
        self._sockets = []


def socket_inodes() -> dict[int, str]:
    """Returns the sockets of this process: descriptor -> the kernel's name of the socket. Empty on macOS."""
    found: dict[int, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def find_connections(earlier: dict[int, str], store: Store, rank: int, world_size: int) -> GlooConnections:
    """Returns the connections between the ranks that were opened after `socket_inodes` returned `earlier`.

    Every rank must call it at the same time. Other threads, such as Ray's, may also have opened connections. So the
    ranks exchange the ends of all new connections through the store. A connection is returned if a peer has its other
    end.
    """
    new = {}
    for fd, inode in socket_inodes().items():
        if earlier.get(fd) != inode:
            try:
                connection = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # closed meanwhile
            ends = _ends(connection)
            if ends is None:
                connection.close()
            else:
                new[ends] = connection
    store.set(f"connections/{rank}", json.dumps(list(new)))
    others = [json.loads(store.get(f"connections/{peer}")) for peer in range(world_size) if peer != rank]
    shared = shared_ends(new, (tuple(ends) for listed in others for ends in listed))
    for ends, connection in new.items():
        if ends not in shared:
            connection.close()
    return GlooConnections([connection for ends, connection in new.items() if ends in shared])


def shared_ends(own: Iterable[Ends], others: Iterable[Ends]) -> set[Ends]:
    """Returns the connections in `own` whose other end is in `others`, the peers' connections. Pure."""
    mirrored = {(host, port, own_host, own_port) for own_host, own_port, host, port in others}
    return mirrored.intersection(own)


def _ends(connection: socket.socket) -> Ends | None:
    """Returns the ends of a TCP connection; None for another socket, or if it is not connected."""
    try:
        here = connection.getsockname()
        peer = connection.getpeername()
    except OSError:
        return None
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return _plain(here[0]), here[1], _plain(peer[0]), peer[1]


def _plain(host: str) -> str:
    """Returns an address without the interface, because machines give interfaces different names."""
    return host.partition("%")[0]
