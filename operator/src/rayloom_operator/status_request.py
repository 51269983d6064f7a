"""What is asked of an engine's admin port, /status and /drain: one request on a connection of its own.

A general HTTP client takes twice the time for it, which at 600 answers a second would be half a core.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import sys
from types import SimpleNamespace
from typing import cast

from rayloom_operator.errors import EngineUnavailable

_TIMEOUT_S = 3.0
_MAX_BYTES = 1 << 20  # a status has some thousand
_FIRST_LINE = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2}) ")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)


async def ask(ip: str, port: int, token: str, method: str = "GET", path: str = "/status") -> tuple[int, bytes]:
    """The answer's code and body. Redirects are answers. Raises EngineUnavailable."""
    host = f"[{ip}]" if ":" in ip else ip
    request = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        "Accept: application/json\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    exchange = _Exchange(request, loop.create_future())
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            transport, _ = await loop.create_connection(lambda: exchange, ip, port)
            try:
                received = await exchange.received
            finally:
                transport.abort()
        return _answer(received)
    except TimeoutError as error:
        raise EngineUnavailable(f"no answer within {_TIMEOUT_S:g} s") from error
    # The last two are http.client's of a length that is no length.
    except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
        raise EngineUnavailable(f"{type(error).__name__}: {error}") from error


class _Exchange(asyncio.Protocol):
    """Sends the request; `received` is all that comes until the answer is whole, or the other side closes."""

    def __init__(self, request: bytes, received: asyncio.Future[bytes]) -> None:
        self._request = request
        self.received = received
        self._parts = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because those of uvloop are no subclass.
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parts += data
        if self.received.done():
            return
        if len(self._parts) > _MAX_BYTES:
            self.received.set_exception(EngineUnavailable(f"an answer of more than {_MAX_BYTES} bytes"))
        elif _body(self._parts) is not None:
            # Not every proxy on the way closes when it is asked to.
            self.received.set_result(bytes(self._parts))

    def connection_lost(self, error: Exception | None) -> None:
        if self.received.done():
            return
        if error is not None:
            self.received.set_exception(error)
        else:
            self.received.set_result(bytes(self._parts))


def _body(received: bytes | bytearray) -> slice | None:
    """Where the body is, when the answer says how long that is, and all of it is there."""
    begin = received.find(b"\r\n\r\n") + 4
    # In chunks it is longer than it says.
    is_plain = begin > 3 and not _CHUNKED.search(received, 0, begin)
    length = _LENGTH.search(received, 0, begin - 2) if is_plain else None
    end = begin + int(length[1]) if length is not None else sys.maxsize
    return slice(begin, end) if len(received) >= end else None


def _answer(received: bytes) -> tuple[int, bytes]:
    first, body = _FIRST_LINE.match(received), _body(received)
    if first is not None and body is not None:
        return int(first[1]), received[body]
    # It reads every field, which is most of what an answer costs, and so is kept for those of another form.
    # Of a socket it only wants a file.
    response = http.client.HTTPResponse(SimpleNamespace(makefile=lambda _: io.BytesIO(received)))  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read()
