"""KeptAnswer: an answer that a task of its own computes. Any number of readers read the answer's bytes so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message

from rayloom_engine.front.http.body_budget import HeldBody

MOST_UNREAD_BYTES = 256 * 1024  # if an answer is not kept, its computation pauses while more bytes than this are unread


class Computation(Protocol):
    """The part of a Generation that shows how many sequences and tokens of the engine an answer uses."""

    has_failed: bool

    @property
    def num_choices(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...


class KeptAnswer:
    """Acts as the client of the request's handler: `receive` gives the handler the request, `send` gets the answer.

    For the handler, this client disconnects as soon as the answer is not kept and has no reader. For one event loop.
    """

    def __init__(self, body: HeldBody, on_growth: Callable[[int], None]) -> None:
        """`body`: body of the request. `on_growth`: called with the size of each part of the answer."""
        self._body: HeldBody | None = body
        self._on_growth = on_growth
        self.request_id: str | None = None  # the answer's X-Request-Id, once the handler has decided it
        self.start: Message | None = None  # status and headers of the answer
        self.error: Exception | None = None  # the error that ended the answer, perhaps before its start
        self.is_whole = False  # the handler has sent the last part
        self.is_complete = False  # the handler has ended
        self.is_kept = True  # all bytes stay, for later readers
        self.computation: Computation | None = None
        self._bytes = bytearray()
        self._num_dropped = 0
        self._positions: dict[asyncio.Event, int] = {}  # event that wakes a reader -> bytes that this reader has read
        self._abandoned = asyncio.Event()
        self._read = asyncio.Event()  # wakes `send`: a reader has read or left, or the answer is not kept any more

    # --- the handler's side ---

    async def receive(self) -> Message:
        """Returns the whole body at first. Later calls wait until the answer is not kept and has no reader."""
        if self._body is not None:
            body, self._body = self._body, None
            # `take` gives the bytes back to the budget. The handler counts them again before another task can run.
            return {"type": "http.request", "body": body.take(), "more_body": False}
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Adds a part of the answer. Waits for readers only if the answer is not kept."""
        if message["type"] == "http.response.start":
            self.start = message
        else:
            body = message.get("body", b"")
            self._bytes += body
            self.is_whole = not message.get("more_body", False)
            self._on_growth(len(body))
        self._wake()
        while not self.is_kept and self._num_unread > MOST_UNREAD_BYTES and not self._abandoned.is_set():
            self._read.clear()
            await self._read.wait()

    def finish(self, error: Exception | None = None) -> None:
        """Records the end of the handler, perhaps by an error. Readers still get all bytes from before the error."""
        if self._body is not None:
            self._body.drop()
        self.error = error
        self.is_complete = True
        self._wake()

    # --- the readers' side ---

    def join(self, wake: asyncio.Event) -> None:
        """Adds a reader, which begins at the first byte. `wake` is set whenever the answer has grown or ended."""
        self._positions[wake] = 0
        wake.set()

    def leave(self, wake: asyncio.Event) -> None:
        """Removes a reader."""
        del self._positions[wake]
        self._release()

    def take(self, wake: asyncio.Event, most_bytes: int) -> bytes:
        """Returns the reader's next bytes; empty if the reader has read all bytes so far."""
        begin = self._positions[wake] - self._num_dropped
        part = bytes(self._bytes[begin : begin + most_bytes])
        if part:
            self._positions[wake] += len(part)
            self._release()
        return part

    # --- the end ---

    def stop_keeping(self) -> None:
        """From now on, only present readers get the answer. If there are no readers, the computation ends."""
        self.is_kept = False
        self._release()

    @property
    def is_good(self) -> bool:
        """True if a repeat may get this complete answer; after a failure the repeat is computed again."""
        has_failed = self.computation is not None and self.computation.has_failed
        return self.start is not None and self.start["status"] == 200 and self.is_whole and not has_failed

    @property
    def _num_unread(self) -> int:
        return self._num_dropped + len(self._bytes) - min(self._positions.values(), default=self._num_dropped)

    def _release(self) -> None:
        """Drops bytes that all readers have read. Without readers, ends the computation. Does nothing if `is_kept`."""
        if self.is_kept:
            return
        end = self._num_dropped + len(self._bytes)
        num_read = min(self._positions.values(), default=end) - self._num_dropped
        del self._bytes[:num_read]
        self._num_dropped += num_read
        self._read.set()
        if not self._positions:
            self._abandoned.set()  # disconnects the handler's client, which ends the computation

    def _wake(self) -> None:
        for wake in self._positions:
            wake.set()
