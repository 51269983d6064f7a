"""The front's side of the greeting: opens a connection to a core on the Unix socket or over TCP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rayloom_engine.protocol.channel import limit_tcp
from rayloom_engine.protocol.framing import MAX_HELLO_BYTES, FrameReader, core_decoder, frame, read_frame
from rayloom_engine.protocol.front_auth import common_version, core_proof, front_proof, is_same_proof
from rayloom_engine.protocol.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    CoreMessage,
    FrontChallenge,
    Hello,
    StartTls,
    Welcome,
)
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.protocol.tls.stream import TlsRefused, TlsStream, begin_tls

HANDSHAKE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LinkTls:
    """TLS to the engines of a gateway."""

    files: TlsFiles
    is_strict: bool  # engines without TLS are not used
    server_name: str = ""  # the name in the engines' certificates; empty: the host of each engine's address


@dataclass(frozen=True, slots=True)
class CoreAddress:
    """The address of the core's socket, and the credentials of the front."""

    address: str  # unix:PATH or tcp:HOST:PORT
    token: str = field(repr=False)  # unix: the run's token, which is sent; tcp: the service's key, which is never sent
    front_id: str = "front"
    old_token: str = field(default="", repr=False)  # tcp: the key before `token`, which the core may still have
    tls: LinkTls | None = None  # for tcp; None: clear text


def addresses(
    places: Mapping[str, str], key: str, front_id: str, old_key: str = "", tls: LinkTls | None = None
) -> dict[str, CoreAddress]:
    """Returns the addresses of engines by their names. `places`: name -> HOST:PORT."""
    return {name: CoreAddress(f"tcp:{place}", key, front_id, old_key, tls) for name, place in places.items()}


class ProtocolError(Exception):
    """The process at the core's address does not speak this protocol, or does not have the key."""


class OtherKey(ProtocolError):
    """The process at the core's address has another key."""


@dataclass(frozen=True, slots=True)
class CoreConnection:
    """An open connection, whose core has accepted this front."""

    reader: FrameReader
    writer: asyncio.StreamWriter  # only for ending the connection
    send: Callable[[bytes], None]  # sends bytes without waiting, encrypted if `is_encrypted`
    welcome: Welcome
    is_encrypted: bool


async def connect(core: CoreAddress) -> CoreConnection:
    """Returns a connection on which both sides have greeted each other.

    If the core has another key than `token`, greets it again with `old_token`, unless `old_token` is empty.
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
        host, port = _host_and_port(place)
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), HANDSHAKE_SECONDS)
        limit_tcp(writer.get_extra_info("socket"))
        greeting = asyncio.wait_for(_greet_remote(core, host, reader, writer), HANDSHAKE_SECONDS)
    try:
        return await greeting
    except BaseException:
        writer.transport.abort()
        raise


def _host_and_port(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.strip("[]"), int(port)


async def _greet_local(core: CoreAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> CoreConnection:
    writer.write(frame(Hello(token=core.token, front_id=core.front_id)))
    welcome = _welcome(core_decoder.decode(await read_frame(reader)))
    return CoreConnection(reader, writer, writer.write, welcome, is_encrypted=False)


async def _greet_remote(
    core: CoreAddress, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> CoreConnection:
    challenge = await _challenge(reader)
    if not _wants_tls(core, challenge):
        welcome = await _prove(core, challenge, reader, writer.write)
        return CoreConnection(reader, writer, writer.write, welcome, is_encrypted=False)
    assert core.tls is not None
    writer.write(frame(StartTls()))
    stream, challenge = await _start_tls(core.tls, core.tls.server_name or host, reader, writer)
    welcome = await _prove(core, challenge, stream, stream.write)
    return CoreConnection(stream, writer, stream.write, welcome, is_encrypted=True)


def _wants_tls(core: CoreAddress, challenge: FrontChallenge) -> bool:
    """Returns whether the connection continues with TLS.

    Raises ProtocolError if one side requires TLS and the other side has none.
    """
    if core.tls is None and challenge.tls == "required":
        raise ProtocolError("the engine requires TLS; set tls_cert_file, tls_key_file and tls_ca_file")
    if core.tls is not None and core.tls.is_strict and not challenge.tls:
        raise ProtocolError(
            "the engine has no TLS; set its front_tls_cert_file, or tls_mode permissive as long as there are such "
            "engines"
        )
    return core.tls is not None and bool(challenge.tls)


async def _start_tls(
    tls: LinkTls, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[TlsStream, FrontChallenge]:
    """Returns the encrypted stream, and the challenge that the core sent on it. Raises ProtocolError."""
    try:
        stream = await begin_tls(reader, writer, tls.files.context(), name)
    except TlsRefused as error:
        raise ProtocolError(
            f"the engine's certificate is refused: {error}; it must be valid now, for the name {name!r}, and of the CA "
            "in tls_ca_file"
        ) from error
    try:
        return stream, await _challenge(stream)
    except TlsRefused as error:
        raise ProtocolError(
            f"the engine refuses this gateway's certificate: {error}; the one in tls_cert_file must be valid now, and "
            "of the CA in the engine's front_tls_ca_file"
        ) from error


async def _challenge(reader: FrameReader) -> FrontChallenge:
    challenge = core_decoder.decode(await read_frame(reader, MAX_HELLO_BYTES))
    if not isinstance(challenge, FrontChallenge):
        raise ProtocolError(f"expected FrontChallenge, got {type(challenge).__name__}")
    return challenge


async def _prove(
    core: CoreAddress, challenge: FrontChallenge, reader: FrameReader, send: Callable[[bytes], None]
) -> Welcome:
    """Returns the core's Welcome, after both sides have proved to each other that they have the key."""
    version = common_version(challenge.version)
    if version is None:
        raise ProtocolError(
            f"the core speaks protocol {challenge.version}, this front {OLDEST_VERSION} to {PROTOCOL_VERSION}"
        )
    hello = Hello(front_id=core.front_id, version=version, nonce=secrets.token_hex(16))
    proof = front_proof(core.token, challenge.nonce, hello)
    send(frame(msgspec.structs.replace(hello, proof=proof)))
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
