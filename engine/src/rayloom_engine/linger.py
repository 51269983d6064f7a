"""`python -m rayloom_engine.linger`: the preStop hook of a pod with ranks.

When a whole engine replica is deleted, Kubernetes terminates all its pods at the same time. The engine then finishes
its streams, and needs its ranks for this. So the pods with ranks wait here until the engine has exited. If only pods
with ranks are terminated, each pod waits a few seconds, in case the engine is about to drain. Then the pod exits, its
ranks are replaced, and every stream continues.

While the engine's pod terminates, the engine's DNS names do not resolve. So the hook takes the engine's address from
open TCP connections. Ranks are connected to the rank port, and the pod's Ray is connected to Ray's head, which runs in
the engine's pod. The pod's Ray is connected even before the first rank connects.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

Answer = Literal["draining", "working", "silent", "gone"]

RAY_PORT = 6379  # default port of Ray's head
# Seconds within which the engine's drain must begin. The drain begins later than this hook: another kubelet terminates
# the engine's pod, and the front in that pod begins to drain two seconds later.
_PATIENCE_S = 6.0
_POLL_S = 0.2
_ANSWER_S = 1.0
_ESTABLISHED = "01"


def linger(look: Callable[[], Answer], clock: Callable[[], float], sleep: Callable[[float], object]) -> str:
    """Waits until the pod may exit. Returns the reason.

    Returns at once if there is no engine. Otherwise returns when the engine's drain is over, or if no drain begins
    within _PATIENCE_S. While an engine does not answer, its last known state is used for _PATIENCE_S.
    """
    was_draining = False
    until = clock() + _PATIENCE_S
    while clock() < until:
        answer = look()
        if answer == "gone":
            return "the engine has ended"
        if answer == "draining":
            was_draining = True
            until = clock() + _PATIENCE_S
        elif answer == "working" and was_draining:
            return "the engine does not drain any more"
        sleep(_POLL_S)
    return "the engine fell silent" if was_draining else "the engine does not drain"


def engines(table: str, ports: Collection[int]) -> Iterator[str]:
    """Yields the remote addresses of established connections to one of `ports`, from the text of /proc/net/tcp or tcp6.

    Addresses in this text are hexadecimal, in words of four bytes in the machine's byte order
    (https://www.kernel.org/doc/html/latest/networking/proc_net_tcp.html).
    """
    for line in table.splitlines()[1:]:
        _, _, remote, state, *_ = line.split()
        address, _, number = remote.partition(":")
        if state == _ESTABLISHED and int(number, 16) in ports:
            words = (bytes.fromhex(address[i : i + 8]) for i in range(0, len(address), 8))
            packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
            yield socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)


def ask(host: str, port: int) -> Answer:
    """Returns the state of the engine at `host`, from /ready on its API port, which needs no key."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/ready")
        body = connection.getresponse().read()
    except ConnectionRefusedError:
        return "gone"
    except (OSError, http.client.HTTPException):
        return "silent"
    finally:
        connection.close()
    try:
        return "draining" if json.loads(body)["error"]["code"] == "engine_draining" else "working"
    except (ValueError, KeyError, TypeError):
        return "working"


class Look:
    """A function object that returns the engine's state.

    Each call sends a request to every address to which this pod has a connection. Earlier addresses are kept, because a
    drain closes connections. If the answers differ, "draining" takes precedence, then "silent", then "working".
    """

    def __init__(
        self, ports: Collection[int], ask: Callable[[str], Answer], tables: Callable[[], Iterator[str]]
    ) -> None:
        self._ports = ports
        self._ask = ask
        self._tables = tables
        self._hosts: set[str] = set()

    def __call__(self) -> Answer:
        self._hosts.update(host for table in self._tables() for host in engines(table, self._ports))
        answers = {self._ask(host) for host in self._hosts}
        order: tuple[Answer, ...] = ("draining", "silent", "working")
        return next((answer for answer in order if answer in answers), "gone")


def _connections() -> Iterator[str]:
    return (path.read_text() for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.linger", description=__doc__)
    parser.add_argument("--rank-port", type=int, required=True, help="the engine's port for ranks")
    parser.add_argument("--port", type=int, required=True, help="the engine's API port")
    parser.add_argument("--ray-port", type=int, default=RAY_PORT, help="port of Ray's head")
    args = parser.parse_args()
    look = Look((args.rank_port, args.ray_port), lambda host: ask(host, args.port), _connections)
    print(linger(look, time.monotonic, time.sleep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
