"""AnswerReader: the response to one connection that reads a KeptAnswer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayloom_engine.front.http.errors import ClientGone
from rayloom_engine.front.idempotency.kept_answer import KeptAnswer

PART_BYTES = 64 * 1024
REPLAYED = (b"idempotent-replayed", b"true")  # the header by which clients of Stripe's API recognise a repeated answer


class AnswerReader(Response):
    """Reads a KeptAnswer from its first byte. `on_end` is called once, with True if the whole answer was sent."""

    def __init__(self, kept: KeptAnswer, receive: Receive, on_end: Callable[[bool], None], *, is_repeat: bool) -> None:
        self.background = None
        self._kept = kept
        self._on_end = on_end
        self._is_repeat = is_repeat
        self._is_gone = False
        self._wake = asyncio.Event()
        kept.join(self._wake)
        self._watcher = asyncio.create_task(self._watch(receive))

    async def until_begun(self) -> None:
        """Waits for status and headers. Raises ClientGone, or the error that the handler raised before sending them."""
        try:
            while self._kept.start is None:
                if self._kept.is_complete:
                    raise self._kept.error or ClientGone()
                await self._wait()
        except BaseException:
            self._end(is_whole=False)
            raise
        self.status_code = self._kept.start["status"]
        self.raw_headers = [*self._kept.start["headers"], *([REPLAYED] if self._is_repeat else [])]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_all(send)
            is_whole = not self._is_gone
        except ClientGone:
            return
        finally:
            self._end(is_whole=is_whole)

    async def _send_all(self, send: Send) -> None:
        while True:
            part = self._kept.take(self._wake, PART_BYTES)
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            elif self._kept.is_complete:
                break
            else:
                await self._wait()
        if self._kept.is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._kept.error is not None:
            raise self._kept.error

    async def _wait(self) -> None:
        """Waits until the answer has grown or ended. Raises ClientGone if the connection broke."""
        if not self._is_gone:
            await self._wake.wait()
            self._wake.clear()
        if self._is_gone:
            raise ClientGone

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._wake.set()

    def _end(self, *, is_whole: bool) -> None:
        self._watcher.cancel()
        self._kept.leave(self._wake)
        self._on_end(is_whole)
