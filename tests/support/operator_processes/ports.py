"""Ports for operators that start later: no other operator and no connection takes one meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

# Above the ports of local clusters (28,172 is the last one of a KubeRay) and of rt_ports.py, and below those that the
# kernel gives to outgoing connections. Each process of `pytest -n` has NUM ports of its own; five processes have room.
FIRST, NUM = 28_200, 800


def _shuffled() -> Iterator[int]:
    first = FIRST + NUM * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return itertools.cycle(random.sample(range(first, first + NUM), NUM))


_ports = _shuffled()


def operator_port() -> int:
    """Returns a port that nothing listens on, and that the last hundreds of calls have not returned."""
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
