"""A client on a plain socket, whose connection the test can break in the middle of an answer."""

from __future__ import annotations

import json
import socket
import struct
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """One POST of a JSON body. Answers are read as bytes, chunk sizes included."""

    def __init__(self, url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), timeout=60.0)
        data = json.dumps(body, separators=(",", ":")).encode()  # the same bytes as httpx would send
        fields = {"Host": "test", "Content-Type": "application/json", "Content-Length": str(len(data))}
        lines = [f"{name}: {value}\r\n" for name, value in {**fields, **(headers or {})}.items()]
        self._socket.sendall(f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + data)
        self.received = b""

    def read_until(self, part: bytes) -> bytes:
        """Reads until the answer contains `part`. Returns everything that was read so far."""
        while part not in self.received:
            data = self._socket.recv(65536)
            assert data, f"the connection ended; so far: {self.received[-500:]!r}"
            self.received += data
        return self.received

    def vanish(self) -> None:
        """Breaks the connection with a reset, as if the client's process or machine had died."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self._socket.close()


def streamed_text(events: str) -> str:
    """The text of a streamed chat or completion with one choice. Fails unless the stream is complete."""
    assert events.rstrip().endswith("data: [DONE]"), events[-500:]
    documents = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for document in documents for choice in document["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
