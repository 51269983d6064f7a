"""Ports for servers that a test starts later or repeatedly. No other test and no connection uses these ports."""

from __future__ import annotations

import contextlib
import random
import socket

# The ports are below Kubernetes' NodePorts, and below the ports that Linux assigns to outgoing connections and to
# listeners at port 0. Local clusters (`Place.port`) may run beside these tests. The last port of a cluster's etcd is
# 22,470, and the first port of an API server is 26,443. So clusters use no port in between.
FIRST, LAST = 22_500, 26_399
_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(number: int) -> tuple[int, ...]:
    """Returns consecutive ports without a listener.

    While this process runs, no process gets these ports again from this function.
    """
    while True:
        first = random.randrange(FIRST, LAST + 2 - number)
        ports = tuple(range(first, first + number))
        with contextlib.ExitStack() as names, contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            # A bound abstract socket claims a port for this process. The kernel keeps the name of the socket until the
            # last process with this socket ends or is killed.
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
