"""HTTP requests to an engine's admin port, /status and /drain: one request per connection.

This module has its own HTTP client. A general client needs twice the CPU time, which is half a core more at 600
responses a second.

An engine's image may be hostile, and all tenants share this process. So a response has a size limit. The time to read a
response is linear in its size, even if the response arrives in tiny pieces.
"""

from __future__ import annotations

import asyncio
import re
from typing import cast

from rayloom_operator.errors import EngineUnavailable

_TIMEOUT_S = 3.0
# The largest size of headers and body together, in bytes. A status of the minimal form, which `Prefer` requests, has a
# few thousand bytes, or 60 thousand with a thousand ranks.
MAX_BYTES = 64 << 10
# The largest size of a response without `Preference-Applied`, in bytes. Engines of the previous version ignore `Prefer`
# and send the full status. A full status has 150 thousand bytes.
MAX_FULL_BYTES = 256 << 10
_MAX_CHUNKS = 256
_UNAUTHORIZED = 401
_FIRST_LINE = re.compile(rb"HTTP/1\.[01] ([2-5][0-9]{2}) ")
_MINIMAL = re.compile(rb"\r\npreference-applied:[ \t]*return=minimal[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*chunked", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_ANY_LENGTH = re.compile(rb"\r\ncontent-length:", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[^\r\n]*\r\n")


async def ask(
    ip: str, port: int, token: str, method: str = "GET", path: str = "/status", body: bytes = b""
) -> tuple[int, bytes]:
    """Sends a request, and returns the response's status code and body. Redirects are not followed.

    Raises EngineUnavailable if no valid response arrives within 3 s.
    """
    host = f"[{ip}]" if ":" in ip else ip
    request = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        f"Accept: application/json\r\nPrefer: return=minimal\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode() + body
    loop = asyncio.get_running_loop()
    exchange = _Exchange(request, loop.create_future())
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            transport, _ = await loop.create_connection(lambda: exchange, ip, port)
            try:
                found = await exchange.answer
            finally:
                transport.abort()
    except TimeoutError as error:
        raise EngineUnavailable(f"no answer within {_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise EngineUnavailable(_words(error)) from error
    if isinstance(found, str):
        raise EngineUnavailable(found)
    return found


async def ask_either(
    ip: str, port: int, tokens: tuple[str, str], method: str = "GET", path: str = "/status", body: bytes = b""
) -> tuple[int, bytes]:
    """Like `ask`. If the engine answers 401 to the first token, sends the request again with the second token.

    An empty second token is not used.
    """
    token, old_token = tokens
    code, answer = await ask(ip, port, token, method, path, body)
    if code == _UNAUTHORIZED and old_token:
        return await ask(ip, port, old_token, method, path, body)
    return code, answer


class _Exchange(asyncio.Protocol):
    """Sends the request and collects the response.

    Searches only new bytes, so that the time for a response in tiny pieces is linear in its size.
    """

    def __init__(self, request: bytes, answer: asyncio.Future[tuple[int, bytes] | str]) -> None:
        self._request = request
        self._received = bytearray()
        self._body_at: int | None = None  # offset of the body, once the headers are complete
        self._end: int | None = None  # offset of the response's end; None if the headers give no length
        self._max_bytes = MAX_BYTES  # limit of the response; complete headers may raise it to MAX_FULL_BYTES
        # Status code and body, or the reason why there is no valid response. The future never gets an exception: its
        # traceback would refer to the caller's frame, and that frame refers to the future. Such a cycle would stay in
        # memory, with the connection, until a garbage collection.
        self.answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is for mypy. isinstance would be False: uvloop's transports are no subclasses of asyncio.Transport.
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.answer.done():
            return
        searched = max(0, len(self._received) - 3)
        self._received += data
        if self._body_at is None and (at := self._received.find(b"\r\n\r\n", searched, MAX_BYTES)) >= 0:
            self._body_at = at + 4
            self._end = self._end_by_length()
            is_minimal = _MINIMAL.search(self._received, 0, at + 2) is not None
            self._max_bytes = MAX_BYTES if is_minimal else MAX_FULL_BYTES
        if max(len(self._received), self._end or 0) > self._max_bytes:
            self._fail(f"an answer of more than {self._max_bytes} bytes")
            return
        if self._end is not None and len(self._received) >= self._end:
            # The response is complete. Some proxies ignore `Connection: close`, so the connection may stay open.
            self._finish(self._received[self._body_at : self._end])

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer.done():
            return
        if error is not None:
            self._fail(_words(error))
        elif self._body_at is None or self._end is not None:
            self._fail("the connection ended before the answer did")
        elif _CHUNKED.search(self._received, 0, self._body_at):
            body = _from_chunks(self._received, self._body_at)
            self._finish(body) if body is not None else self._fail("an answer in chunks that cannot be read")
        elif _ANY_LENGTH.search(self._received, 0, self._body_at):
            self._fail("an answer whose Content-Length is not a number")
        else:
            self._finish(self._received[self._body_at :])

    def _end_by_length(self) -> int | None:
        """Returns the offset of the end, from Content-Length; None without a length or for a chunked body."""
        body_at = self._body_at or 0
        if _CHUNKED.search(self._received, 0, body_at):
            return None
        length = _LENGTH.search(self._received, 0, body_at - 2)
        return None if length is None else body_at + int(length[1])

    def _finish(self, body: bytes | bytearray) -> None:
        first = _FIRST_LINE.match(self._received)
        if first is None:
            self._fail("an answer that is not HTTP")
        else:
            self.answer.set_result((int(first[1]), bytes(body)))

    def _fail(self, why: str) -> None:
        self.answer.set_result(why)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _from_chunks(received: bytearray, at: int) -> bytes | None:
    """Decodes the chunked body that begins at `at`; None if the body is incomplete or has more than _MAX_CHUNKS
    chunks."""
    parts: list[bytes] = []
    for _ in range(_MAX_CHUNKS):
        chunk = _CHUNK.match(received, at)
        if chunk is None:
            return None
        size = int(chunk[1], 16)
        if size == 0:
            return b"".join(parts)
        at = chunk.end() + size + 2
        if at > len(received):
            return None
        parts.append(bytes(received[chunk.end() : chunk.end() + size]))
    return None
