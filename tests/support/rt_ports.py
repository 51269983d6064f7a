"""Ports for servers that a test starts later or repeatedly. No other test and no connection uses these ports."""

from __future__ import annotations

import contextlib
import random
import socket

# The ports are below Kubernetes' NodePorts, and below the ports that Linux assigns to outgoing connections and to
# listeners at port 0. Local clusters (`Place.port`) may run beside these tests. The last port of their etcd is 22,470,
# and the first port of their API servers is 26,443, so clusters use no port in between.
FIRST, LAST = 22_500, 26_399
_reserved: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(number: int) -> tuple[int, ...]:
    """Returns consecutive ports without a listener. While this process runs, no process gets them again from here."""
    while True:
        first = random.randrange(FIRST, LAST + 2 - number)
        ports = tuple(range(first, first + number))
        with contextlib.ExitStack() as names, contextlib.ExitStack() as listeners, contextlib.suppress(OSError):
            # The kernel keeps the name of an abstract socket until its last process ends, even if that process is
            # killed.
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
