"""BoundedProtocol: uvicorn's HTTP protocol with limits on the size of a request and on the time to send it.

A parser keeps a header until it is complete, so without a limit three clients without a key can fill the memory
(CVE-2025-48956 of vLLM). The limits are those of common proxies, far above the requests of this API's clients.

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
from rayloom_engine.front.http.errors import ApiError, unavailable

PIECE_BYTES = 16 * 1024  # the parser gets no more at once, so a header exceeds its limit by at most so much
LINGER_S = 1.0  # a refused client's bytes are read and dropped for so long: a TCP reset would destroy the answer
LINGER_BYTES = 4 * 1024 * 1024
LATE_S = 1.0  # a timer that fires later than this shows that the event loop was blocked, not the client


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one request."""

    head_bytes: int = 64 * 1024  # request line, headers and trailers together
    head_fields: int = 256  # headers and trailers together
    head_s: float = 10.0  # from the connection's start or a request's first byte to the last header
    body_s: float = 30.0  # between two parts of a body, and in addition to the time for its size
    body_bytes_per_s: float = 256 * 1024  # 8 MiB have 62 s


class BoundedProtocol(HttpToolsProtocol):
    """A connection. Pipelined requests are answered in order, and a refusal waits for the answers before it."""

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
        self._head_bytes = 0  # of this request, in callbacks of the parser so far
        self._head_fields = 0
        self._loose_bytes = 0  # fed to the parser since its last callback; it may keep them
        self._num_events = 0
        self._excess: ApiError | None = None  # raised in a callback; the answer once the parser has returned
        self._refusal: ApiError | None = None  # once set, nothing more is parsed
        self._dropped_bytes = 0
        self._body_due = 0.0  # by the loop's clock: due time of the next part of the body; each byte extends it
        self._deadline: float | None = None  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    # The connection's life.
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

    def evict(self) -> None:
        """Closes the connection at once, in favour of another one."""
        self.transport.abort()

    # Bytes.
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
            # Blank lines before a request end uvicorn's time limit of an idle connection.
            self._expect_by(self._limits.head_s)

    def send_400_response(self, msg: str) -> None:
        """Answers a parser error; called by uvicorn."""
        self._refuse(self._excess or ApiError(400, f"{msg.rstrip('.')}; send HTTP/1.1"))

    # The parser's callbacks.
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_events += 1
        self._head_bytes = self._head_fields = 0
        if self._phase != "open":  # the time of a first request counts from the connection's start
            self._expect_by(self._limits.head_s)
        self._phase = "head"

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._count_head(len(name) + len(value) + 4)
        if self._phase == "head":  # trailers of a body are not passed on
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_events += 1
        self._phase = "body"
        self._body_due = self.loop.time() + self._limits.body_s
        self._expect_by(self._limits.body_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        if not self.cycle.response_complete:  # the rest of a refused body gets no more time
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
        if not self.cycle.response_complete:  # a refusal may have been sent before the end of the body
            self._table.has_request(self)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        # Only the newest of pipelined requests can have an incomplete body, and that request gets no answer.
        if is_last or (self._phase == "body" and not self.pipeline):
            self._table.waits(self)
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self._send_refusal(self._refusal)

    def _count_head(self, num_bytes: int) -> None:
        """Counts bytes of the head. Raises ValueError when it is too large, which ends the parser's call."""
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

    # Time.
    def _expect_by(self, seconds: float) -> None:
        """Sets the time limit of the phase, or of the next part of a body."""
        self._deadline = self.loop.time() + max(0.0, seconds)
        # A connection has one timer, replaced only when it is too late: a timer for every part of a body would cost
        # more.
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
            self._deadline = now + min(LATE_S, seconds)  # bytes that arrived meanwhile are still to be read
        self._body_due = max(self._body_due, self._deadline)
        if self._deadline > now:
            self._timer = self.loop.call_later(self._deadline - now, self._check_time)
        else:
            self._time_out(seconds)

    def _is_held_up(self) -> bool:
        """True if the server, not the client, delays the next bytes."""
        waits_for_100 = self._phase == "body" and self.cycle.waiting_for_100_continue
        return self.flow.read_paused or waits_for_100

    def _time_out(self, seconds: float) -> None:
        if self._phase in ("open", "idle"):
            self.transport.close()  # the client has sent no request
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
        """Stops parsing, and answers `refusal` after all earlier requests are answered."""
        self._refusal = refusal
        cycle = self.cycle
        is_owed = cycle is not None and not cycle.response_complete
        if is_owed and self._phase == "body":  # the refused request has reached the application, or its queue
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
            self.transport.close()  # its answer was sent already
            return
        self._unset_keepalive_if_required()
        self.transport.write(self._answer(refusal))
        self.transport.write_eof()
        self._table.waits(self)
        self.loop.call_later(LINGER_S, self.transport.close)

    def _answer(self, refusal: ApiError) -> bytes:
        body = msgspec.json.encode(refusal.body())
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
