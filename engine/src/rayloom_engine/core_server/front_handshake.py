"""The core's side of a front's greeting: on the Unix socket by the run's token, over TCP by the service's key."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets

from rayloom_engine.protocol.framing import MAX_HELLO_BYTES, frame, front_decoder, read_frame
from rayloom_engine.protocol.front_auth import common_version, core_proof, front_proof, is_same_proof
from rayloom_engine.protocol.messages import OLDEST_VERSION, PROTOCOL_VERSION, FrontChallenge, Hello, Welcome

_HELLO_SECONDS = 5.0


class FrontRefused(Exception):
    """The peer is no front of this service, or speaks another version."""


async def greet_local(reader: asyncio.StreamReader, token: str, epoch: int) -> Welcome:
    """Returns the answer to the Hello of a front on the Unix socket.

    Raises FrontRefused, ValueError, msgspec.DecodeError, OSError, EOFError or TimeoutError.
    """
    hello = await _hello(reader)
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise FrontRefused("refused a connection without the right token")
    return _welcome(hello, epoch)


async def greet_remote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, epoch: int) -> Welcome:
    """Like `greet_local`, for a gateway over TCP: sends a challenge first. The Welcome has a proof of the key."""
    nonce = secrets.token_hex(16)
    writer.write(frame(FrontChallenge(nonce=nonce)))
    hello = await _hello(reader)
    if not is_same_proof(hello.proof, front_proof(key, nonce, hello)):
        raise FrontRefused("refused a gateway without the right key; give it the key in this engine's front_key_file")
    welcome = _welcome(hello, epoch)
    return Welcome(
        epoch=welcome.epoch,
        pid=welcome.pid,
        version=welcome.version,
        proof=core_proof(key, nonce, hello.nonce, welcome),
    )


async def _hello(reader: asyncio.StreamReader) -> Hello:
    hello = front_decoder.decode(await asyncio.wait_for(read_frame(reader, MAX_HELLO_BYTES), _HELLO_SECONDS))
    if not isinstance(hello, Hello):
        raise FrontRefused(f"refused a connection that began with {type(hello).__name__}")
    return hello


def _welcome(hello: Hello, epoch: int) -> Welcome:
    # A newer front has read this core's version in the FrontChallenge, and must use that version.
    if hello.version > PROTOCOL_VERSION or (version := common_version(hello.version)) is None:
        raise FrontRefused(
            f"refused front {hello.front_id}: it speaks protocol {hello.version}, this core {OLDEST_VERSION} to "
            f"{PROTOCOL_VERSION}"
        )
    return Welcome(epoch=epoch, pid=os.getpid(), version=version)
