"""Ports for operators that start later. In the meantime no other operator and no connection uses these ports."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

# The ports are above those of rt_ports.py and above the last port of local clusters, 28,172 (of a KubeRay). They are
# below the ports that the kernel assigns to outgoing connections. Each worker of `pytest -n` has NUM ports; there is
# room for five workers.
FIRST, NUM = 28_200, 800


def _shuffled() -> Iterator[int]:
    first = FIRST + NUM * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return itertools.cycle(random.sample(range(first, first + NUM), NUM))


_ports = _shuffled()


def operator_port() -> int:
    """Returns a port without a listener. The same port is returned again only after hundreds of other calls."""
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
