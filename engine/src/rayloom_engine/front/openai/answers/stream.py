"""Server-sent events: sends deltas as they arrive, comments while nothing arrives, and an error as the last event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayloom_engine.front.generation.answer_headers import answer_headers, cold_start_comment
from rayloom_engine.front.generation.deltas import ChoiceDelta
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.generation.sink import EventsOfText
from rayloom_engine.front.http.direct_body import DirectBody, direct_body, framed
from rayloom_engine.front.http.errors import ApiError, ClientGone, api_error
from rayloom_engine.front.http.json_pieces import pieces

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
Event = dict[str, Any] | bytes  # a JSON document, or a whole event as bytes
PART_BYTES = 64 * 1024  # the most bytes of events that are sent before other streams get a turn


class EventWriter(Protocol):
    """The part of streaming that differs between endpoints. Every event is one JSON document."""

    has_event_names: bool  # True if each event has a line `event:` with the document's `type`
    ping: bytes  # sent when no delta arrives for `Waits.ping_s` seconds (front/operations/service.py)
    end: bytes  # sent after the last event of a complete answer

    def opening(self) -> list[dict[str, Any]]:
        """Returns the events before the first delta. They are sent without waiting for a delta."""

    def chunks(self, delta: ChoiceDelta) -> Sequence[Event]:
        """Returns the events for one delta."""

    def text_events(self, index: int) -> EventsOfText | None:
        """Returns the writer of a choice's next events if these differ in their text alone.

        Returns None if `chunks` must write all deltas. Never called before the choice's first delta. The result is used
        until the generation has a new warning.
        """

    def closing(self) -> list[dict[str, Any]]:
        """Returns the events after the last delta."""

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Returns the last events of a stream that ends in an error."""


class DirectStream:
    """A DeltaSink: makes the events of small deltas and writes them to the connection, without the stream's task."""

    __slots__ = ("_writer", "framed", "is_open", "write")

    def __init__(self, writer: EventWriter, body: DirectBody) -> None:
        self._writer = writer
        self.framed = framed
        self.write = body.write
        self.is_open = body.is_open

    def part(self, delta: ChoiceDelta) -> bytes:
        events = self._writer.chunks(delta)
        if len(events) == 1 and isinstance(events[0], bytes):  # the usual case: one token
            return self.framed(events[0])
        return self.framed(b"".join(_pieces(self._writer, events))) if events else b""

    def text_events(self, index: int) -> EventsOfText | None:
        return self._writer.text_events(index)


class EventStream(Response):
    """The answer to a streaming request. At its end, closes the generation and stops watching the client."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        deltas: AsyncIterator[list[ChoiceDelta]],
        first: list[ChoiceDelta],
        writer: EventWriter,
        watcher: asyncio.Task[None],
    ) -> None:
        """`first`: the first list from `deltas`, which the caller has already taken."""
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **answer_headers(generation)})
        self._told_held_s = generation.held_s()
        self._is_waiting = True  # True until the first delta arrives
        self._is_direct = False  # True: small deltas bypass the task
        self._generation = generation
        self._deltas = deltas
        self._first = first
        self._writer = writer
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = direct_body(scope)
        try:
            if body is not None:
                body.hold()  # the head leaves with the first event
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_deltas(send, body)
        except ClientGone:
            return
        finally:
            self._watcher.cancel()
            self._generation.close()
            if body is not None:
                body.release()

    async def _send_deltas(self, send: Send, body: DirectBody | None) -> None:
        async def send_part(data: bytes, *, is_last: bool = False) -> None:
            if is_last and body is not None:
                body.release()  # after the last part, the refusal of a pipelined request may follow at once
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if body is not None:
                body.release()

        try:
            for part in chain(self._parts(self._writer.opening()), self._delta_parts(self._first)):
                await send_part(part)
                await asyncio.sleep(0)  # let other streams run before the next part is encoded
            if body is not None:
                body.release()  # if there is no event yet, the client gets the head alone
            self._write_directly(body)
            async for deltas in self._deltas:
                for number, part in enumerate(self._delta_parts(deltas) if deltas else (self._writer.ping,)):
                    if number:
                        await asyncio.sleep(0)  # let other streams run before the next part is encoded
                    await send_part(part)
                self._write_directly(body)
        except Exception as error:
            if isinstance(error, ClientGone):
                raise
            self._generation.failed(error)
            known = api_error(error)
            if known is None:
                # The client gets a last event; the log gets the traceback.
                crash = ApiError(500, "internal error; the server's log says more", type="server_error")
                await send_part(b"".join(self._parts(self._writer.failure(crash))), is_last=True)
                raise
            await send_part(b"".join(self._parts(self._writer.failure(known))), is_last=True)
            return
        for part in self._parts(self._writer.closing()):
            await send_part(part)
        await send_part(self._writer.end, is_last=True)
        self._generation.answered()

    def _write_directly(self, body: DirectBody | None) -> None:
        """Makes later small deltas bypass the task.

        The task itself sends the first deltas, because a comment may have to precede them.
        """
        if body is not None and not self._is_waiting and not self._is_direct:
            self._is_direct = True
            self._generation.feed_into(DirectStream(self._writer, body))

    def _delta_parts(self, deltas: list[ChoiceDelta]) -> Iterator[bytes]:
        """Yields the events of `deltas`, as one part if they are small."""
        if deltas and self._is_waiting:
            self._is_waiting = False
            held_s = self._generation.held_s()
            if held_s > self._told_held_s:
                yield cold_start_comment(held_s)
        yield from self._parts(event for delta in deltas for event in self._writer.chunks(delta))

    def _parts(self, events: Iterable[Event]) -> Iterator[bytes]:
        held: list[bytes] = []
        num_bytes = 0
        for piece in _pieces(self._writer, events):
            held.append(piece)
            num_bytes += len(piece)
            if num_bytes > PART_BYTES:
                yield b"".join(held)
                held = []
                num_bytes = 0
        if held:
            yield b"".join(held)


def _pieces(writer: EventWriter, events: Iterable[Event]) -> Iterator[bytes]:
    """Yields the text of events."""
    for event in events:
        if isinstance(event, bytes):
            yield event
            continue
        if writer.has_event_names:
            yield f"event: {event['type']}\n".encode()
        yield b"data: "
        yield from pieces(event)
        yield b"\n\n"
