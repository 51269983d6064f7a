"""Fetches text files from an engine, part by part, over the connection that also carries the tokens."""

from __future__ import annotations

import asyncio

from rayloom_engine.errors import ModelError
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.messages import FetchFile, FilePart, TextFile

_PART_SECONDS = 20.0


class TextFetch:
    """Fetches one file after the other. For one event loop."""

    def __init__(self) -> None:
        self._expected: tuple[str, int] | None = None
        self._part: asyncio.Future[bytes] | None = None
        self._link: EngineLink | None = None  # the engine that is to send the part

    def receive(self, message: FilePart) -> None:
        """Receives a part of a file. Drops a part that was not requested, or that comes too late."""
        if self._part is not None and not self._part.done() and self._expected == (message.sha256, message.start):
            self._part.set_result(message.data)

    def check_connection(self) -> None:
        """Ends the wait for a part of a file if its engine has been lost. Call it when a connection has ended."""
        if self._part is not None and not self._part.done() and self._link is not None and not self._link.is_connected:
            self._part.set_result(b"")

    async def fetch(self, link: EngineLink, file: TextFile) -> bytes:
        """Returns the content of a file, whose hash is not checked yet. Raises ModelError."""
        content = bytearray()
        while len(content) < file.num_bytes:
            if not link.is_connected:
                raise ModelError(f"{link.name} cannot hand over {file.name}")
            self._expected = (file.sha256, len(content))
            self._part = asyncio.get_running_loop().create_future()
            self._link = link
            link.send(frame(FetchFile(*self._expected)))
            try:
                data = await asyncio.wait_for(self._part, _PART_SECONDS)
            except TimeoutError as error:
                raise ModelError(f"{link.name} did not hand over {file.name} in time") from error
            if not data:
                problem = "cannot read" if link.is_connected else "was lost before it had sent"
                raise ModelError(f"{link.name} {problem} its {file.name}")
            content += data
        return bytes(content)
