"""Measures the servers in turn, several times, so that a busy moment of the machine does not slow one server alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayloom_bench.gateway.load import LoadFailed, LoadResult, LoadSettings, run_load
from rayloom_bench.gateway.servers import MeasuredServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """All rounds of one server. `rounds` is empty if the server is not installed."""

    name: str
    version: str
    rounds: tuple[LoadResult, ...]

    @property
    def event_us(self) -> tuple[float, ...]:
        """CPU microseconds of the server for each event, by round."""
        return tuple(1e6 * each.cpu_s / each.num_events for each in self.rounds)

    @property
    def token_us(self) -> tuple[float, ...]:
        """CPU microseconds of the server for each token, by round. Below `event_us` if events have several tokens."""
        return tuple(1e6 * each.cpu_s / each.num_tokens for each in self.rounds)

    @property
    def events_s(self) -> tuple[float, ...]:
        """Events per second that all clients together received, by round."""
        return tuple(each.num_events / each.seconds for each in self.rounds)

    @property
    def first_event_ms(self) -> float:
        """Median milliseconds from a single request to its first event while the streams run, over all rounds."""
        return 1e3 * statistics.median(seconds for each in self.rounds for seconds in each.first_event_s)

    @property
    def alone_first_event_ms(self) -> float:
        """Median milliseconds from a single request to its first event before the streams, over all rounds."""
        return 1e3 * statistics.median(seconds for each in self.rounds for seconds in each.alone_first_event_s)


def measure(
    servers: Sequence[MeasuredServer], settings: LoadSettings, num_rounds: int, log: Callable[[str], None]
) -> list[ServerFigures]:
    """Returns the figures of the servers, in their order. Raises LoadFailed."""
    found: dict[str, list[LoadResult]] = {server.name: [] for server in servers}
    for number in range(num_rounds):
        for server in servers:
            if server.port:
                try:
                    result = run_load(server.port, settings, server.cpu_seconds)
                except LoadFailed as failure:
                    raise LoadFailed(f"{server.name}: {failure}") from failure
                found[server.name].append(result)
                cost = 1e6 * result.cpu_s / result.num_events
                log(f"round {number + 1}: {server.name}: {cost:.1f} us an event")
    return [
        ServerFigures(name=server.name, version=server.version, rounds=tuple(found[server.name])) for server in servers
    ]
