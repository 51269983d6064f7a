"""`python -m rayloom_engine.linger`: the last thing that a pod with ranks does, before its processes are stopped.

When a whole engine is deleted all its pods are told so at the same moment. While the engine then finishes its streams
its ranks must stay, so their pods wait here until it has ended. A pod that is to go alone waits a few seconds, because
the engine may be about to say that it drains, and goes: its ranks are replaced, and every stream goes on.

No name is looked up, because an engine's names go with it. Where the engine is, connections say: those of ranks, and
those of the pod's Ray to the head's, which is in the engine's pod and knows of ranks that are about to attach.
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

RAY_PORT = 6379  # of Ray's head, by Ray's own default
# The engine's own pod is told to stop by another node's kubelet, and its front drains two seconds later.
_PATIENCE_S = 6.0
_LOOK_S = 0.2
_ANSWER_S = 1.0
_ESTABLISHED = "01"


def linger(look: Callable[[], Answer], clock: Callable[[], float], sleep: Callable[[float], object]) -> str:
    """Returns why the pod may end: at once when there is no engine, and otherwise when it has drained or does not
    begin to for a while. An engine that is silent is believed to do what it did, for as long."""
    was_draining, until = False, clock() + _PATIENCE_S
    while clock() < until:
        answer = look()
        if answer == "gone":
            return "the engine has ended"
        if answer == "draining":
            was_draining, until = True, clock() + _PATIENCE_S
        elif answer == "working" and was_draining:
            return "the engine does not drain any more"
        sleep(_LOOK_S)
    return "the engine fell silent" if was_draining else "the engine does not drain"


def engines(table: str, ports: Collection[int]) -> Iterator[str]:
    """Addresses with an established connection to one of `ports` of theirs in a table of /proc/net/tcp or tcp6.

    Each is in hexadecimal, in words of four bytes in the machine's order
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
    """What the engine at `host` does, by its API port, which asks for no key here."""
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
    """Asks the engine wherever a connection was seen, now or earlier: while it drains, connections come and go."""

    def __init__(
        self, ports: Collection[int], ask: Callable[[str], Answer], tables: Callable[[], Iterator[str]]
    ) -> None:
        self._ports, self._ask, self._tables = ports, ask, tables
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
    parser.add_argument("--rank-port", type=int, required=True, help="port of the engine that ranks connect to")
    parser.add_argument("--port", type=int, required=True, help="its API port")
    parser.add_argument("--ray-port", type=int, default=RAY_PORT, help="port of Ray's head")
    args = parser.parse_args()
    look = Look((args.rank_port, args.ray_port), lambda host: ask(host, args.port), _connections)
    print(linger(look, time.monotonic, time.sleep))
    return 0


if __name__ == "__main__":
    sys.exit(main())
