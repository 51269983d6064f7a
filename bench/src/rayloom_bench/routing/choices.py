"""Choices: the URL to which a client sends each request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayloom_bench.fleet.policies import LeastLoaded, Policy, RoundRobin, RoutedRequest
from rayloom_bench.routing.servers import RoutedEngines
from rayloom_engine.config import BLOCK_SIZE

_NO_REQUEST = RoutedRequest("", "", (), BLOCK_SIZE)  # these policies read no field of a request


class UrlChoice:
    """A policy of `bench fleet` without reports, which chooses between URLs instead of engines."""

    def __init__(self, policy: Policy, urls: Sequence[str]) -> None:
        self._policy = policy
        for url in urls:
            policy.added(url)

    def pick(self) -> str:
        """Returns the URL for a request, which counts as unfinished until `ended`."""
        url = self._policy.pick(_NO_REQUEST)
        assert url is not None
        self._policy.sent(url, _NO_REQUEST)
        return url

    def ended(self, url: str) -> None:
        self._policy.ended(url, "")


GATEWAY = "gateway, by tokens"
ROUND_ROBIN = "round robin"
FEWEST = "fewest requests"
CHOICES: dict[str, Callable[[RoutedEngines], UrlChoice]] = {
    GATEWAY: lambda engines: UrlChoice(RoundRobin(), [engines.gateway_url]),
    ROUND_ROBIN: lambda engines: UrlChoice(RoundRobin(), engines.engine_urls),
    FEWEST: lambda engines: UrlChoice(LeastLoaded(), engines.engine_urls),
}
