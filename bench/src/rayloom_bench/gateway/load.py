"""The clients of one measurement: many streams that are read as cheaply as Python can, and single short requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

PATH = "/v1/chat/completions"
OPENING_S = 0.005  # seconds between the openings of two streams
# The measured window begins SETTLING_S x (number of streams) after all streams have had their first event. So no stream
# opens in the window.
SETTLING_S = 0.005
START_S = 120.0  # seconds within which each stream must have its first event
PROBE_S = 60.0  # seconds within which a single request must have its first event
PAUSE_S = 0.013  # seconds between single requests; no multiple of a step, so that they arrive at any time within a step
_EVENT = b"data: {"


class LoadFailed(Exception):
    """A stream was refused, broken or too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The size of a measurement."""

    num_streams: int
    window_s: float  # seconds in which CPU time and events are counted
    num_probes: int  # single requests before the streams open, and again after the window, while the streams run


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Counts and times of the clients of one server."""

    num_events: int  # events of all streams within the window
    num_tokens: int  # tokens in these events; more than the events if a late server sends several tokens at once
    seconds: float
    cpu_s: float  # CPU time of the server within the window
    # for each single request while the streams run: seconds from the request to its first event
    first_event_s: tuple[float, ...]
    alone_first_event_s: tuple[float, ...]  # the same for each single request before the streams


def run_load(port: int, settings: LoadSettings, cpu_seconds: Callable[[], float]) -> LoadResult:
    """Opens the streams, measures, and closes them. `cpu_seconds`: the server's CPU time so far. Raises LoadFailed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_load(port, settings, cpu_seconds))


class StreamClient(asyncio.Protocol):
    """One connection with one request.

    Counts events by their first bytes (_EVENT), which nearly always arrive in one read.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._sent_s = 0.0
        self.num_events = 0
        self.num_tokens = 0
        self.problem = ""
        self.first_event_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        count = data.count(_EVENT)
        self.num_events += count
        # Each word has a blank before it. The only other blank of an event is after "data:".
        self.num_tokens += data.count(b" ") - count
        if not self.first_event_s.done():
            if not data.startswith(b"HTTP/1.1 200") and not self.num_events:
                self.problem = self.problem or data[:300].decode(errors="replace")
            if count:
                self.first_event_s.set_result(time.perf_counter() - self._sent_s)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.first_event_s.done():
            self.first_event_s.set_exception(LoadFailed(self.problem or f"the connection ended early: {error}"))


def request(num_tokens: int) -> bytes:
    """A whole HTTP request for a stream of `num_tokens` tokens."""
    document = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me about the fox and the dog."}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    body = json.dumps(document).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _load(port: int, settings: LoadSettings, cpu_seconds: Callable[[], float]) -> LoadResult:
    endless = request(100_000)
    clients: list[StreamClient] = []
    try:
        alone_first_event_s = [await _probe(port) for _ in range(settings.num_probes)]
        for _ in range(settings.num_streams):
            clients.append(await _connected(port, endless))
            await asyncio.sleep(OPENING_S)
        async with asyncio.timeout(START_S):
            await asyncio.gather(*(client.first_event_s for client in clients))
        await asyncio.sleep(SETTLING_S * settings.num_streams)
        before_s = cpu_seconds()
        num_before = _counts(clients)
        began_s = time.perf_counter()
        await asyncio.sleep(settings.window_s)
        cpu_s = cpu_seconds() - before_s
        num_events, num_tokens = (after - before for after, before in zip(_counts(clients), num_before, strict=True))
        seconds = time.perf_counter() - began_s
        first_event_s = [await _probe(port) for _ in range(settings.num_probes)]
    except TimeoutError as error:
        raise LoadFailed("a stream had no event in time") from error
    finally:
        for client in clients:
            client.transport.abort()
    return LoadResult(
        num_events=num_events,
        num_tokens=num_tokens,
        seconds=seconds,
        cpu_s=cpu_s,
        first_event_s=tuple(first_event_s),
        alone_first_event_s=tuple(alone_first_event_s),
    )


def _counts(clients: list[StreamClient]) -> tuple[int, int]:
    """Events and tokens of all streams so far."""
    return sum(client.num_events for client in clients), sum(client.num_tokens for client in clients)


async def _probe(port: int) -> float:
    """Seconds from a request to its first event."""
    await asyncio.sleep(PAUSE_S)
    client = await _connected(port, request(1))
    try:
        async with asyncio.timeout(PROBE_S):
            return await client.first_event_s
    finally:
        client.transport.abort()


async def _connected(port: int, data: bytes) -> StreamClient:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: StreamClient(data), "127.0.0.1", port)
    return client
