"""WholeAnswer: the response to a request that does not stream."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rayloom_engine.front.generation.answer_headers import answer_headers
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http import json_pieces

PART_BYTES = 64 * 1024  # bytes of each part of a large answer; a part waits until most of the earlier parts are sent
WHOLE_BYTES = 1024 * 1024  # a larger answer has no Content-Length


class WholeAnswer(Response):
    """The answer to a request that does not stream.

    At its end, closes the generation and cancels the task that watches the client.
    The request counts as in flight until the answer is sent, so a drain also waits for slow clients. A document of more
    than WHOLE_BYTES is sent while it is being encoded; a smaller document has a Content-Length.
    """

    media_type = "application/json"

    def __init__(self, generation: Generation, document: dict[str, Any], watcher: asyncio.Task[None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(answer_headers(generation))
        self._generation = generation
        self._document = document
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_document(send)
        finally:
            self._watcher.cancel()
            self._generation.close()

    async def _send_document(self, send: Send) -> None:
        num_bytes = 0
        held: list[bytes] = []
        is_begun = False
        for part in json_pieces.parts(self._document, PART_BYTES):
            if self._generation.is_client_gone:
                return  # the client is gone, so nobody would read the rest
            num_bytes += len(part)
            held.append(part)
            if num_bytes > WHOLE_BYTES:
                if not is_begun:
                    is_begun = True
                    await self._begin(send)
                await _send_parts(send, held)
                held = []
            await asyncio.sleep(0)  # let other requests run before the next part is encoded
        if not is_begun:
            self.headers["content-length"] = str(num_bytes)
            await self._begin(send)
        await _send_parts(send, held)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._generation.answered()

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _send_parts(send: Send, parts: list[bytes]) -> None:
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
