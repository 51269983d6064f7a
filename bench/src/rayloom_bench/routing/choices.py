"""Choices: the URL to which a client sends each request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rayloom_bench.routing.servers import RoutedEngines


class EngineChoice(Protocol):
    """Picks a URL for each request, and learns when its answer has ended."""

    def pick(self) -> str: ...

    def ended(self, url: str) -> None: ...


class InTurn:
    """The next URL for each request: round robin, or always the same with a single URL."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._turn = -1

    def pick(self) -> str:
        self._turn += 1
        return self._urls[self._turn % len(self._urls)]

    def ended(self, url: str) -> None:
        pass


class FewestRequests:
    """The URL with the fewest unfinished requests, in turn if there are several."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._num_unfinished = dict.fromkeys(urls, 0)
        self._last_turn = dict.fromkeys(urls, 0)
        self._turn = 0

    def pick(self) -> str:
        url = min(self._num_unfinished, key=lambda each: (self._num_unfinished[each], self._last_turn[each]))
        self._turn += 1
        self._last_turn[url] = self._turn
        self._num_unfinished[url] += 1
        return url

    def ended(self, url: str) -> None:
        self._num_unfinished[url] -= 1


GATEWAY = "gateway, by tokens"
ROUND_ROBIN = "round robin"
FEWEST = "fewest requests"
CHOICES: dict[str, Callable[[RoutedEngines], EngineChoice]] = {
    GATEWAY: lambda engines: InTurn([engines.gateway_url]),
    ROUND_ROBIN: lambda engines: InTurn(engines.engine_urls),
    FEWEST: lambda engines: FewestRequests(engines.engine_urls),
}
