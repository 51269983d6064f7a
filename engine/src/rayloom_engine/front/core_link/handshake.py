"""The front's side of the greeting: opens a connection to a core on the Unix socket or over TCP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rayloom_engine.protocol.channel import limit_tcp
from rayloom_engine.protocol.framing import MAX_HELLO_BYTES, core_decoder, frame, read_frame
from rayloom_engine.protocol.front_auth import common_version, core_proof, front_proof, is_same_proof
from rayloom_engine.protocol.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    CoreMessage,
    FrontChallenge,
    Hello,
    Welcome,
)

HANDSHAKE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CoreAddress:
    """The address of the core's socket, and the credentials of the front."""

    address: str  # unix:PATH or tcp:HOST:PORT
    token: str = field(repr=False)  # unix: the run's token, which is sent; tcp: the service's key, which is never sent
    front_id: str = "front"
    old_token: str = field(default="", repr=False)  # tcp: the key before `token`, which the core may still have


def addresses(places: Mapping[str, str], key: str, front_id: str, old_key: str = "") -> dict[str, CoreAddress]:
    """Returns the addresses of engines by their names. `places`: name -> HOST:PORT."""
    return {name: CoreAddress(f"tcp:{place}", key, front_id, old_key) for name, place in places.items()}


class ProtocolError(Exception):
    """The process at the core's address does not speak this protocol, or does not have the key."""


class OtherKey(ProtocolError):
    """The process at the core's address has another key."""


@dataclass(frozen=True, slots=True)
class CoreConnection:
    """An open connection, whose core has accepted this front."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    welcome: Welcome


async def connect(core: CoreAddress) -> CoreConnection:
    """Returns a connection on which both sides have greeted each other.

    A core that has another key than `token` is greeted again with `old_token`, if there is one.
    Raises OSError, EOFError, ValueError, msgspec.MsgspecError, TimeoutError or ProtocolError.
    """
    try:
        return await _connect(core)
    except OtherKey:
        if not core.old_token:
            raise
    return await _connect(replace(core, token=core.old_token))


async def _connect(core: CoreAddress) -> CoreConnection:
    kind, _, place = core.address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(place)
        greeting = _greet_local(core, reader, writer)
    else:
        host, _, port = place.rpartition(":")
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), HANDSHAKE_SECONDS)
        limit_tcp(writer.get_extra_info("socket"))
        greeting = asyncio.wait_for(_greet_remote(core, reader, writer), HANDSHAKE_SECONDS)
    try:
        return CoreConnection(reader, writer, await greeting)
    except BaseException:
        writer.transport.abort()
        raise


async def _greet_local(core: CoreAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
    writer.write(frame(Hello(token=core.token, front_id=core.front_id)))
    return _welcome(core_decoder.decode(await read_frame(reader)))


async def _greet_remote(core: CoreAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
    challenge = core_decoder.decode(await read_frame(reader, MAX_HELLO_BYTES))
    if not isinstance(challenge, FrontChallenge):
        raise ProtocolError(f"expected FrontChallenge, got {type(challenge).__name__}")
    version = common_version(challenge.version)
    if version is None:
        raise ProtocolError(
            f"the core speaks protocol {challenge.version}, this front {OLDEST_VERSION} to {PROTOCOL_VERSION}"
        )
    hello = Hello(front_id=core.front_id, version=version, nonce=secrets.token_hex(16))
    proof = front_proof(core.token, challenge.nonce, hello)
    writer.write(frame(msgspec.structs.replace(hello, proof=proof)))
    try:
        welcome = _welcome(core_decoder.decode(await read_frame(reader, MAX_HELLO_BYTES)))
    except asyncio.IncompleteReadError as error:
        raise OtherKey("the core refused this front; both need the same key") from error
    if not is_same_proof(welcome.proof, core_proof(core.token, challenge.nonce, hello.nonce, welcome)):
        raise OtherKey("the process at this address does not have the key")
    return welcome


def _welcome(message: CoreMessage) -> Welcome:
    if not isinstance(message, Welcome):
        raise ProtocolError(f"expected Welcome, got {type(message).__name__}")
    return message
