"""Runs the load generator during a disturbance: starts streams, waits for their tokens, then collects the records.

with Timeline(service) as timeline, running_load(service, strike_at=16) as load:
    load.strike(timeline, "a pod is deleted", delete_it)
    load.wait(timeline, service.is_available, 90.0)
load.records["streams"]
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from clients.load import LoadAgent
from clients.service import Service, wait
from observers.timeline import Timeline


class RunningLoad:
    """Running streams. After the end of the block, `records` has the records of all streams and probes."""

    def __init__(self, service: Service, agent: LoadAgent) -> None:
        self.records: dict[str, Any] = {}
        self._service = service
        self._agent = agent

    def strike(self, timeline: Timeline, what: str, strike: Callable[[], object]) -> None:
        """Calls `strike`, which may return the Unix time of the event. New requests arrive from now on."""
        timeline.begin(what)
        happened_at = strike()
        if isinstance(happened_at, float):
            timeline.begin(what, happened_at)
        self.start_arrivals()

    def start_arrivals(self) -> None:
        """Makes the clients send new requests from now on."""
        self._agent.send("start_arrivals")

    def wait_for_streams(self) -> None:
        """Returns when no stream runs and none will arrive. Can only be called without the setting `steady`."""
        assert "ended" in self._agent.receive()

    def wait(self, timeline: Timeline, is_over: Callable[[], bool], seconds: float, pause_s: float = 0.25) -> float:
        """Waits for `is_over`, and returns the Unix time. Fails with the timeline after `seconds`."""
        wait(is_over, seconds, lambda: f"{timeline.table()}\n{self._service.story()}", pause_s)
        return time.time()

    def stop(self) -> None:
        """Stops new requests, and waits until the running requests have ended and their records have arrived."""
        self._agent.send("stop")
        while "streams" not in self.records:
            self.records = self._agent.receive()


@contextlib.contextmanager
def running_load(service: Service, **settings: Any) -> Iterator[RunningLoad]:
    """Runs streams by the `settings` of LoadAgent. When the block begins, each stream has `strike_at` tokens.

    Calls `stop` at the end of the block, except if the block has failed or has called `stop` itself.
    """
    agent = LoadAgent(service, **settings)
    try:
        agent.receive()  # every stream has tokens
        load = RunningLoad(service, agent)
        yield load
        if not load.records:
            load.stop()
    finally:
        agent.process.kill()
