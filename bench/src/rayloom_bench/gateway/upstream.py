"""A plain server of events, for proxies: answers a chat request with the words of the simulated engine.

Each stream gets its first event at once and one more in every step, like the streams of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re

import uvloop

from rayloom_bench.gateway.text import WORDS

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ID = "0123456789abcdef" * 2


def event(word: str) -> bytes:
    """The event of one token as a chunk of a chunked body. It has the form and size of the gateway's events."""
    document = {
        "id": f"chatcmpl-{_ID}",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": f"fp_{_ID[:10]}",
        "choices": [{"index": 0, "delta": {"content": f" {word}"}, "logprobs": None, "finish_reason": None}],
    }
    return _chunk(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = tuple(event(word) for word in WORDS)
END = _chunk(b"data: [DONE]\n\n") + _chunk(b"")


class Stream(asyncio.Protocol):
    """One connection: a request, its answer, then the next request. `streams`: connections with unfinished answers."""

    def __init__(self, streams: set[Stream]) -> None:
        self._streams = streams
        self._received = b""
        self._num_events = 0
        self._num_wanted = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        num_bytes = int(length[1]) if length else 0
        if not found or len(body) < num_bytes:
            return
        self._received = b""
        if num_bytes == 0:  # a readiness check of the server or its proxy
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        self._num_events = 0
        self._num_wanted = int(json.loads(body)["max_tokens"])
        self._streams.add(self)
        self._transport.write(_HEAD)
        self.send()

    def send(self) -> None:
        """Sends the next event, and after the last event the end of the answer."""
        self._transport.write(EVENTS[self._num_events % len(EVENTS)])
        self._num_events += 1
        if self._num_events == self._num_wanted:
            self._streams.discard(self)
            self._transport.write(END)

    def connection_lost(self, error: Exception | None) -> None:
        self._streams.discard(self)


async def serve(port: int, rate: float) -> None:
    """Serves until it is cancelled."""
    streams: set[Stream] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(streams), "127.0.0.1", port, backlog=1024)
    async with server:
        due_s = loop.time()
        while True:
            due_s = max(due_s + 1 / rate, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for stream in list(streams):
                stream.send()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="steps in a second")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.rate))
