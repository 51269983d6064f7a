"""The core's side of a front's greeting. It checks the run's token on the Unix socket, and TLS and the key over TCP."""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from dataclasses import dataclass

from rayloom_engine.protocol.framing import MAX_HELLO_BYTES, FrameReader, frame, front_decoder, read_frame
from rayloom_engine.protocol.front_auth import common_version, core_proof, front_proof, is_same_proof
from rayloom_engine.protocol.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    FrontChallenge,
    FrontMessage,
    Hello,
    StartTls,
    Welcome,
)
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.protocol.tls.stream import TlsRefused, TlsStream, begin_tls

_HELLO_SECONDS = 5.0


class FrontRefused(Exception):
    """The peer is no front of this service, or it speaks none of the protocol versions that this core speaks."""


@dataclass(frozen=True, slots=True)
class PortTls:
    """The certificate of the port for gateways, and whether gateways without TLS are refused."""

    files: TlsFiles
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Greeted:
    """The answer to a front's Hello, and the TLS stream of the connection (None: the connection is in clear text)."""

    welcome: Welcome
    stream: TlsStream | None = None


async def greet_local(reader: asyncio.StreamReader, token: str, epoch: int) -> Greeted:
    """Returns the answer to the Hello of a front on the Unix socket.

    Raises FrontRefused, ValueError, msgspec.DecodeError, OSError, EOFError or TimeoutError.
    """
    async with asyncio.timeout(_HELLO_SECONDS):
        hello = _hello(await _message(reader))
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise FrontRefused("refused a connection without the right token")
    return Greeted(_welcome(hello, epoch))


async def greet_remote(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, tls: PortTls | None, epoch: int
) -> Greeted:
    """Returns the same as `greet_local`, for a gateway over TCP. Sends a challenge first.

    The Welcome proves that this core has the key. The time limit is for TLS and the greeting together. A slow handshake
    delays only this coroutine.
    """
    async with asyncio.timeout(_HELLO_SECONDS):
        return await _greet_remote(reader, writer, key, tls, epoch)


async def _greet_remote(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, tls: PortTls | None, epoch: int
) -> Greeted:
    nonce = secrets.token_hex(16)
    writer.write(frame(FrontChallenge(nonce=nonce, tls=_offer(tls))))
    message = await _message(reader)
    stream = None
    if isinstance(message, StartTls) and tls is not None:
        try:
            stream = await begin_tls(reader, writer, tls.files.context())
        except TlsRefused as error:
            raise FrontRefused(f"refused a gateway in the TLS handshake: {error}") from error
        nonce = secrets.token_hex(16)  # a new nonce, because nothing that was sent in clear text is trusted
        stream.write(frame(FrontChallenge(nonce=nonce)))
        message = await _message(stream)
    hello = _hello(message)
    if stream is None and tls is not None and tls.is_strict:
        raise FrontRefused(
            "refused a gateway without TLS; give it tls_cert_file, tls_key_file and tls_ca_file, or set this engine's "
            "front_tls_mode to permissive"
        )
    if not is_same_proof(hello.proof, front_proof(key, nonce, hello)):
        raise FrontRefused("refused a gateway without the right key; give it the key in this engine's front_key_file")
    welcome = _welcome(hello, epoch)
    proven = Welcome(
        epoch=welcome.epoch,
        pid=welcome.pid,
        version=welcome.version,
        proof=core_proof(key, nonce, hello.nonce, welcome),
    )
    return Greeted(proven, stream)


def _offer(tls: PortTls | None) -> str:
    if tls is None:
        return ""
    return "required" if tls.is_strict else "offered"


async def _message(reader: FrameReader) -> FrontMessage:
    return front_decoder.decode(await read_frame(reader, MAX_HELLO_BYTES))


def _hello(message: FrontMessage) -> Hello:
    if not isinstance(message, Hello):
        raise FrontRefused(f"refused a connection that began with {type(message).__name__}")
    return message


def _welcome(hello: Hello, epoch: int) -> Welcome:
    # A newer front knows this core's version from the FrontChallenge, and must not send a newer version.
    if hello.version > PROTOCOL_VERSION or (version := common_version(hello.version)) is None:
        raise FrontRefused(
            f"refused front {hello.front_id}: it speaks protocol {hello.version}, this core {OLDEST_VERSION} to "
            f"{PROTOCOL_VERSION}"
        )
    return Welcome(epoch=epoch, pid=os.getpid(), version=version)
