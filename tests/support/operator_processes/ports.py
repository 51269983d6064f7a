"""Ports for operators that start later: no other operator and no connection takes one meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

# The ports of each process of `pytest -n` begin this far after those of the process before it. They are below those
# that the kernel gives to outgoing connections, and the components of local clusters have none of them
# (local_kubernetes/machine/place.py).
_FIRST, _NUM = 23_000, 800


def _shuffled() -> Iterator[int]:
    first = _FIRST + _NUM * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return itertools.cycle(random.sample(range(first, first + _NUM), _NUM))


_ports = _shuffled()


def free_port() -> int:
    """Returns a port that nothing listens on, and that the last hundreds of calls have not returned."""
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
