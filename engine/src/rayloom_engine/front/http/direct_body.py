"""DirectBody: writes parts of an answer's body to its connection from a callback, without a task.

An ASGI application awaits `send` for each part of a body, and every middleware wraps this `send`. For the tokens of a
stream, these calls cost more CPU time than the write to the socket. So BoundedProtocol offers a DirectBody as an
extension of the scope. Status line, headers and the end of the body still go through `send`.

A DirectBody can also hold back what `send` writes, so that the head of an answer leaves together with its first part.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "rayloom.direct_body"
# The line before the data of a small chunk, by size. Looking it up takes a third of the time of formatting it.
_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(2048))


class DirectBody:
    """The chunked body of one answer."""

    __slots__ = ("_cycle", "write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.write = cycle.transport.write  # writes what `framed` returns, while `is_open`

    def is_open(self) -> bool:
        """True if a part may be written now: the answer has begun, and the client is connected and reads fast enough.

        If the client reads too slowly, use `send`, which waits until the client has caught up.
        """
        cycle = self._cycle
        has_begun = cycle.chunked_encoding  # None until the status line is written
        return has_begun is True and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def hold(self) -> None:
        """Holds back what `send` writes, until `release`. Call it before the head of the answer is sent.

        Each write wakes the client's process, so a head that is written alone delays the first part.
        """
        self._cycle.transport = cast("asyncio.Transport", _HeldTransport(self._cycle))

    def release(self) -> None:
        """Writes everything that was held back. May be called several times."""
        transport: object = self._cycle.transport
        if isinstance(transport, _HeldTransport):
            transport.release()


class _HeldTransport:
    """The transport of a cycle while the DirectBody holds back writes. It has the methods that a cycle calls."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._held.append(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.release()
        self._transport.close()

    def release(self) -> None:
        self._cycle.transport = self._transport
        if self._held and not self._cycle.disconnected:
            self._transport.write(b"".join(self._held))


def framed(data: bytes) -> bytes:
    """Returns `data`, which must not be empty, as a chunk of a body."""
    size = len(data)
    line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
    return b"".join((line, data, b"\r\n"))


def offer(scope: Any, cycle: RequestResponseCycle) -> None:
    """Adds the extension to the scope of a request."""
    scope["extensions"] = {EXTENSION: DirectBody(cycle)}


def direct_body(scope: Scope) -> DirectBody | None:
    """Returns the DirectBody of a request; None if the server does not offer it."""
    found: DirectBody | None = scope.get("extensions", {}).get(EXTENSION)
    return found
