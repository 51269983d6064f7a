"""Ports for servers that a test starts, perhaps later or again: no other test and no connection takes one meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Linux gives to outgoing connections and to listeners at port 0, and below Kubernetes' NodePorts.
# Between the ports of local clusters (`Place.port`), which start and end beside these tests: 22,470 is the last one of
# an etcd, and 26,443 the first one of an API server.
FIRST, LAST = 22_500, 26_399
_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(number: int) -> tuple[int, ...]:
    """Returns consecutive ports that nothing listens on, and that no other process gets here before this one ends."""
    while True:
        first = random.randrange(FIRST, LAST + 2 - number)
        ports = tuple(range(first, first + number))
        with contextlib.ExitStack() as names, contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            # The kernel knows the name of an abstract socket until its last process ends, also if that is killed.
            claims = [names.enter_context(socket.socket(socket.AF_UNIX)) for _ in ports]
            for port, claim in zip(ports, claims, strict=True):
                claim.bind(f"\0rayloom-test-port-{port}")
                for host in ("127.0.0.1", "0.0.0.0"):
                    listener = listeners.enter_context(socket.socket())
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind((host, port))
            names.pop_all()
            _reserved.extend(claims)
            return ports
