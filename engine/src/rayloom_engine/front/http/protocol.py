"""BoundedProtocol: uvicorn's HTTP protocol, with limits on the size of a request and on the time of sending it.

The parser keeps headers in memory until they are complete. Without a limit, three clients could fill the memory, even
without an API key (CVE-2025-48956 of vLLM). The limits are those of common proxies, far above what this API's clients
send.

    open --first byte--> head --blank line--> body --last byte--> idle --first byte--> head ...
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from rayloom_engine.front.http.connections import ConnectionTable
from rayloom_engine.front.http.direct_body import offer
from rayloom_engine.front.http.errors import ApiError, unavailable

# The parser gets at most this many bytes at once. So headers exceed their limit by at most this number.
PIECE_BYTES = 16 * 1024
LINGER_S = 1.0  # seconds in which a refused client's bytes are read and dropped: a TCP reset would destroy the answer
LINGER_BYTES = 4 * 1024 * 1024
# Seconds after `shutdown` in which a connection's next request is still read. The client may have sent this request
# before it could know of the shutdown. The first request of a connection gets more time than a later request.
FIRST_REQUEST_S = 0.5
NEXT_REQUEST_S = 0.1
LATE_S = 1.0  # seconds; if a timer fires later than planned by more than this, the event loop was blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one request."""

    head_bytes: int = 64 * 1024  # request line, headers and trailers together
    head_fields: int = 256  # headers and trailers together
    head_s: float = 10.0  # seconds from a request's first byte to the last header; first request: from the connection
    body_s: float = 30.0  # seconds for the next part of a body; the whole body gets body_s + size / body_bytes_per_s
    body_bytes_per_s: float = 256 * 1024  # with this rate, a body of 8 MiB may take 62 s


class BoundedProtocol(HttpToolsProtocol):
    """The HTTP protocol of one connection. Pipelined requests are answered in order.

    A refusal is sent after the answers to earlier requests.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: ConnectionTable,
        limits: HttpLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = connections
        self._limits = limits
        self._phase: Literal["open", "head", "body", "idle"] = "open"
        self._head_bytes = 0  # bytes of this request's head that the parser has reported
        self._head_fields = 0
        self._loose_bytes = 0  # bytes given to the parser since its last callback; the parser may hold them in memory
        self._num_events = 0
        self._excess: ApiError | None = None  # set when a parser callback raises; becomes the answer
        self._refusal: ApiError | None = None  # once set, no further bytes are parsed
        self._dropped_bytes = 0
        self._body_due = 0.0  # loop time at which the body is too late; each received byte moves this time
        self._deadline: float | None = None  # loop time
        # the connection ends after the present request or, without a present request, after the next request
        self._is_ending = False
        self._timer: asyncio.TimerHandle | None = None

    # Life of the connection.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._table.opened(self):
            self._expect_by(self._limits.head_s)
            return
        busy = "this server has as many connections as it can hold; try again soon"
        transport.write(self._answer(unavailable(busy, "too_many_connections", 2)))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.closed(self)
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ends the connection after a request that the client has sent, even if no byte of it has been read yet.

        Called when a drain begins, and by uvicorn when the server stops. If no request comes, the connection is closed.
        """
        self._is_ending = True
        is_answered = self.cycle is None or self.cycle.response_complete
        if self._refusal is not None or not is_answered or self._phase == "body":
            super().shutdown()
        elif self._phase != "head":
            self._expect_by(FIRST_REQUEST_S if self._phase == "open" else NEXT_REQUEST_S)

    def evict(self) -> None:
        """Closes the connection at once, to make room for another connection."""
        self.transport.abort()

    # Received bytes.
    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._drop(len(data))
            return
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES] if len(data) > PIECE_BYTES else data
            num_events = self._num_events
            super().data_received(piece)
            if self._refusal is not None or self.transport.is_closing():
                return
            self._loose_bytes = 0 if self._num_events != num_events else self._loose_bytes + len(piece)
            if self._head_bytes + self._loose_bytes > self._limits.head_bytes:
                self._refuse(self._too_much())
                return
        if self._phase == "idle" and self._loose_bytes and self._deadline is None:
            # uvicorn stops its own idle timer even for blank lines before a request, so another timer is started.
            self._expect_by(self._limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """Answers a parser error. Called by uvicorn."""
        self._refuse(self._excess or ApiError(400, f"{msg.rstrip('.')}; send HTTP/1.1"))

    # Callbacks of the parser.
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_events += 1
        self._head_bytes = self._head_fields = 0
        if self._phase != "open":  # the time of the first request counts from the start of the connection
            self._expect_by(self._limits.head_s)
        self._phase = "head"

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._count_head(len(name) + len(value) + 4)
        if self._phase == "head":  # trailers, which follow a body, are not passed on
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_events += 1
        self._phase = "body"
        self._body_due = self.loop.time() + self._limits.body_s
        self._expect_by(self._limits.body_s)
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            offer(self.scope, self.cycle)
            if self._is_ending:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        if not self.cycle.response_complete:  # the rest of a refused body does not move the deadline
            now = self.loop.time()
            self._body_due += len(body) / self._limits.body_bytes_per_s
            self._expect_by(min(self._limits.body_s, self._body_due - now))
            if self._body_due >= now + self._limits.body_s:
                self._table.makes_progress(self)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_events += 1
        self._phase = "idle"
        self._deadline = None
        super().on_message_complete()
        if not self.cycle.response_complete:  # a refusal may have been sent before the body was complete
            self._table.has_request(self)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        # The connection waits for its client in two cases: no request is left, or one request is left whose body is not
        # complete yet.
        if is_last or (self._phase == "body" and not self.pipeline):
            self._table.waits(self)
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._refusal)

    def _count_head(self, num_bytes: int) -> None:
        """Counts bytes of the head. Raises ValueError if the head is too large, which makes the parser stop."""
        self._num_events += 1
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.head_bytes or self._head_fields > self._limits.head_fields:
            self._excess = self._too_much()
            raise ValueError(str(self._excess))

    def _too_much(self) -> ApiError:
        return ApiError(
            431,
            f"the request's headers are larger than {self._limits.head_bytes} bytes or more than "
            f"{self._limits.head_fields}; send fewer or shorter ones",
            code="headers_too_large",
        )

    # Time limits.
    def _expect_by(self, seconds: float) -> None:
        """Sets the deadline of the current phase, or of the next part of a body."""
        self._deadline = self.loop.time() + max(0.0, seconds)
        # Each connection has one timer, replaced only if it would fire too late. A new timer for every part of a body
        # would cost more.
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._deadline is None or self._refusal is not None:
            return
        now = self.loop.time()
        seconds = self._limits.body_s if self._phase == "body" else self._limits.head_s
        if self._is_held_up():
            self._deadline = now + seconds
        elif now - self._deadline > LATE_S:
            # the next deadline gives time to read the bytes that arrived while the loop was blocked
            self._deadline = now + min(LATE_S, seconds)
        self._body_due = max(self._body_due, self._deadline)
        if self._deadline > now:
            self._timer = self.loop.call_later(self._deadline - now, self._check_time)
        else:
            self._time_out(seconds)

    def _is_held_up(self) -> bool:
        """True if the server, and not the client, is the reason why no bytes arrive."""
        waits_for_100 = self._phase == "body" and self.cycle.waiting_for_100_continue
        return self.flow.read_paused or waits_for_100

    def _time_out(self, seconds: float) -> None:
        if self._phase in ("open", "idle"):
            self.transport.close()  # no request has begun
            return
        slow = f"headers were not complete within {seconds:g} s"
        if self._phase == "body":
            slow = (
                f"body was too slow: each part must come within {seconds:g} s, and all of it within {seconds:g} s and "
                f"1 s for every {self._limits.body_bytes_per_s:g} bytes"
            )
        self._refuse(ApiError(408, f"the request's {slow}; send it again", code="request_timeout"))

    # Refusals.
    def _refuse(self, refusal: ApiError) -> None:
        """Stops parsing. Answers with `refusal` after all earlier requests are answered."""
        self._refusal = refusal
        cycle = self.cycle
        is_owed = cycle is not None and not cycle.response_complete
        # the application, or uvicorn's queue of pipelined requests, already has the refused request
        if is_owed and self._phase == "body":
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            elif cycle.response_started:
                self.transport.close()
                return
            else:
                cycle.disconnected = True
                cycle.message_event.set()
                is_owed = False
        if not is_owed:
            self._send_refusal(refusal)

    def _send_refusal(self, refusal: ApiError) -> None:
        if self._phase == "body" and self.cycle is not None and self.cycle.response_complete:
            self.transport.close()  # the request was answered already
            return
        self._unset_keepalive_if_required()
        self.transport.write(self._answer(refusal))
        self.transport.write_eof()
        self._table.waits(self)
        self.loop.call_later(LINGER_S, self.transport.close)

    def _answer(self, refusal: ApiError) -> bytes:
        path = self.scope["path"] if self._phase == "body" else ""  # empty while the path is unknown
        body = msgspec.json.encode(refusal.body_at(path))
        headers = [
            *self.server_state.default_headers,
            *((name.lower().encode(), value.encode()) for name, value in (refusal.headers or {}).items()),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[refusal.status], *lines, b"\r\n", body])

    def _drop(self, num_bytes: int) -> None:
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.abort()
