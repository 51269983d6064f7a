"""EnginesDns: finds a gateway's engines as the addresses of a DNS name, for example of a headless Service.

The name is resolved each second. Each address is an engine, whose name is the address. A lookup that fails, or finds no
address, changes nothing: the resolver may be down although the engines are not. The connection to an engine that is
really gone ends anyway.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping

from rayloom_engine.common.rare_lines import OncePerProblem

LOOKUP_S = 1.0  # seconds between the end of a lookup and the next lookup

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host and port -> addresses; raises OSError or UnicodeError

logger = logging.getLogger(__name__)


async def resolve(host: str, port: int) -> list[str]:
    """Returns all IPv4 and IPv6 addresses of a host. Calls the system's resolver in a thread.

    Raises OSError or UnicodeError.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(place[0]) for *_, place in found]


def engines_after(known: Mapping[str, str], addresses: Iterable[str], port: int) -> dict[str, str]:
    """Returns the engines, name -> HOST:PORT, after a lookup. Without `addresses`, returns the `known` engines."""
    places = {each: f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in addresses}
    return {name: places[name] for name in sorted(places, key=_order)} or dict(known)


class EnginesDns:
    """The engines at the addresses of a DNS name."""

    def __init__(self, place: str, resolve: Resolve = resolve, lookup_s: float = LOOKUP_S) -> None:
        """`place`: HOST:PORT of all engines. `lookup_s`: seconds between two lookups."""
        host, _, port = place.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._resolve = resolve
        self._lookup_s = lookup_s
        self._problems = OncePerProblem()

    async def watch(self, on_change: Callable[[Mapping[str, str]], None]) -> None:
        """Calls `on_change` with the engines whenever they have changed. Runs until it is cancelled."""
        known: dict[str, str] = {}
        while True:
            engines = engines_after(known, await self._addresses(), self._port)
            if engines != known:
                known = engines
                on_change(engines)
            await asyncio.sleep(self._lookup_s)

    async def _addresses(self) -> list[str]:
        """Returns the addresses of the name; none if the lookup fails."""
        try:
            addresses = await self._resolve(self._host, self._port)
        except (OSError, UnicodeError) as error:
            if self._problems.is_new(str(error)):
                logger.warning("engines_dns: cannot resolve %s: %s; the list of engines stays", self._host, error)
            return []
        self._problems.solved()
        return addresses


def _order(address: str) -> tuple[int, int]:
    number = ipaddress.ip_address(address.partition("%")[0])
    return number.version, int(number)
