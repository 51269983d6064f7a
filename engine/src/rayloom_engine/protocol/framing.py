"""Length-prefixed msgpack frames: 4 bytes big-endian length, then the body."""

from __future__ import annotations

import asyncio

import msgspec

from rayloom_engine.protocol.messages import CoreMessage, FrontMessage

MAX_FRAME_BYTES = 256 * 1024 * 1024  # a prompt of 8 million tokens; anything larger is a broken peer
MAX_HELLO_BYTES = 64 * 1024  # from a peer that has not proved yet that it has the token

_encoder = msgspec.msgpack.Encoder()
front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
core_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)


def frame(message: FrontMessage | CoreMessage) -> bytes:
    """The bytes of one message, length included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


async def read_frame(reader: asyncio.StreamReader, at_most: int = MAX_FRAME_BYTES) -> bytes:
    """The body of the next frame. Raises asyncio.IncompleteReadError at the end, ValueError for a frame too large."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > at_most:
        raise ValueError(f"frame of {size} bytes, at most {at_most} allowed")
    return await reader.readexactly(size)
