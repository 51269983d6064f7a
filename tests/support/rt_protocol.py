"""The front's HTTP protocol without sockets: its transport stores written bytes, and the test sets its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from rayloom_engine.front.http.connections import ConnectionTable
from rayloom_engine.front.http.protocol import BoundedProtocol, HttpLimits


class Clock:
    """An event loop for a protocol, whose time the test sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = 0.0
        self.due: list[Timer] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(self, self.now + seconds, call)
        self.due.append(timer)
        return timer

    def advance(self, until: float) -> None:
        """Advances the time to `until`, and calls the timers that become due, in order."""
        while due := [timer for timer in self.due if timer.when() <= until]:
            first = min(due, key=Timer.when)
            self.due.remove(first)
            self.now = max(self.now, first.when())
            first.call()
        self.now = until

    def stand_still(self, until: float) -> None:
        """Like `advance`, but all timers fire late, at `until`."""
        self.now = until
        self.advance(until)


class Timer:
    def __init__(self, clock: Clock, at: float, call: Callable[[], None]) -> None:
        self._clock = clock
        self._at = at
        self.call = call

    def when(self) -> float:
        return self._at

    def cancel(self) -> None:
        if self in self._clock.due:
            self._clock.due.remove(self)


class Wire(asyncio.Transport):
    """A transport that stores written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


async def _app(_scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def connection(table: ConnectionTable | None = None) -> tuple[Clock, Wire, BoundedProtocol]:
    """A connection that was opened at 0 s."""
    clock = Clock(asyncio.get_running_loop())
    protocol = BoundedProtocol(
        uvicorn.Config(_app, lifespan="off", log_config=None),
        ServerState(),
        {},
        clock,  # type: ignore[arg-type]
        connections=ConnectionTable(9) if table is None else table,
        limits=HttpLimits(),
    )
    wire = Wire()
    protocol.connection_made(wire)
    return clock, wire, protocol


async def settle() -> None:
    """Runs all tasks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)
