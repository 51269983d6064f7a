"""Length-prefixed msgpack frames: a big-endian length of 4 bytes, then the body."""

from __future__ import annotations

from typing import Protocol

import msgspec

from rayloom_engine.protocol.messages import CoreMessage, FrontMessage

MAX_FRAME_BYTES = 256 * 1024 * 1024  # enough for a prompt of 8 million tokens; a larger frame comes from a broken peer
MAX_HELLO_BYTES = 64 * 1024  # limit for a peer that has not yet proved that it has the token

_encoder = msgspec.msgpack.Encoder()
front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
core_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)


def frame(message: FrontMessage | CoreMessage) -> bytes:
    """Encodes one message, with its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class FrameReader(Protocol):
    """An asyncio.StreamReader, or a TlsStream on top of one."""

    async def readexactly(self, num: int, /) -> bytes: ...


async def read_frame(reader: FrameReader, at_most: int = MAX_FRAME_BYTES) -> bytes:
    """Returns the body of the next frame.

    Raises asyncio.IncompleteReadError if the connection ends, ValueError for a frame above the limit.
    """
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > at_most:
        raise ValueError(f"frame of {size} bytes, at most {at_most} allowed")
    return await reader.readexactly(size)
