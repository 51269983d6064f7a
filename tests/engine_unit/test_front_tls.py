"""TLS on the connections between gateways and a core: certificates, modes, renewal, and peers that stall or inject."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core_server.front_handshake import PortTls
from rayloom_engine.core_server.sockets import CoreIo, GatewayPort, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.front.core_link.handshake import CoreAddress, CoreConnection, LinkTls, ProtocolError, connect
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.link_tls import link_tls
from rayloom_engine.front.gateway.models.models_document import parse_models
from rayloom_engine.front.gateway.models.running_models import RunningModels
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.messages import FrontChallenge, Outputs, SequenceOutput, StartTls, Submit
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.protocol.tls.stream import TlsRefused, TlsStream, begin_tls
from rt_server import wait_until
from rt_tls import DAY, Authority, Issued, write_tls

KEY = "0123456789abcdef0123456789abcdef"
ENGINE = "chat-engines.default.svc"
GATEWAY = "chat-gateway.default.svc"
Relay = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class World:
    """A CA, the files of both sides, and a core whose port for gateways uses them."""

    folder: Path
    authority: Authority
    inbox: Inbox
    io: CoreIo | None = None
    address: str = ""

    def engine_files(self, issued: Issued | None = None) -> TlsFiles:
        issued = issued or self.authority.issue(ENGINE, is_engine=True)
        return TlsFiles(write_tls(self.folder / "engine", "front_tls", issued, self.authority.cert), is_server=True)

    def link_tls(self, issued: Issued | None = None, *, is_strict: bool = True) -> LinkTls:
        issued = issued or self.authority.issue(GATEWAY, is_engine=False)
        paths = write_tls(self.folder / "gateway", "tls", issued, self.authority.cert)
        return LinkTls(TlsFiles(paths, is_server=False), is_strict, ENGINE)

    def listen(self, tls: PortTls | None) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = GatewayPort(listener, KEY, tls)
        status = CoreState(epoch=7, executor="uni").status
        self.io = CoreIo(f"unix:{self.folder}/core.sock", "secret", self.inbox, status, gateways=port)
        self.io.start()
        self.address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"

    async def connect(self, tls: LinkTls | None, address: str = "") -> CoreConnection:
        return await asyncio.wait_for(connect(CoreAddress(address or self.address, KEY, "gateway-1", tls=tls)), 60.0)

    def try_to_connect(self, tls: LinkTls | None) -> bool:
        """Connects, and returns whether the connection is encrypted. Raises the errors of `connect`."""

        async def attempt() -> bool:
            connection = await self.connect(tls)
            connection.writer.transport.abort()
            return connection.is_encrypted

        return asyncio.run(attempt())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, Authority(), Inbox(deque(), threading.Event()))
    yield made
    if made.io is not None:
        made.io.stop()


def _submit(name: str) -> bytes:
    return frame(Submit(sequence_id=name, prompt_ids=(1,), params=DecodingParams(max_tokens=3)))


async def _echo(world: World, connection: CoreConnection, name: str) -> str:
    """Submits a sequence, lets the core answer it from this thread, and returns the id in the answer."""
    assert world.io is not None
    connection.send(_submit(name))

    def received() -> list[int]:
        return [
            number for number, each in list(world.inbox.items) if isinstance(each, Submit) and each.sequence_id == name
        ]

    await asyncio.to_thread(wait_until, lambda: bool(received()), 10.0, lambda: str(world.inbox.items))
    world.io.send(received()[0], Outputs((SequenceOutput(sequence_id=name, token_ids=(9,)),)))
    message = core_decoder.decode(await read_frame(connection.reader))
    while not isinstance(message, Outputs):
        message = core_decoder.decode(await read_frame(connection.reader))
    return message.outputs[0].sequence_id


async def _through(relay: Relay, use: Callable[[str], Awaitable[None]]) -> None:
    """Awaits `use(address)`, while `relay` serves the connections to this address."""
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        await use(f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}")


def test_prompts_and_answers_cross_the_network_encrypted(world: World) -> None:
    world.listen(PortTls(world.engine_files(), is_strict=True))
    wire = bytearray()

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        core = await asyncio.open_connection(*world.address.split(":")[1:])

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                wire.extend(data)
                target.write(data)

        await asyncio.gather(copy(reader, core[1]), copy(core[0], writer))

    async def use(address: str) -> None:
        connection = await world.connect(world.link_tls(), address)
        assert connection.is_encrypted
        assert await _echo(world, connection, "a-name-of-a-sequence") == "a-name-of-a-sequence"
        connection.writer.transport.abort()

    asyncio.run(_through(tap, use))
    assert b"start_tls" in wire, "the connection begins in clear text"
    assert b"hello" not in wire
    assert b"a-name-of-a-sequence" not in wire


@pytest.mark.parametrize(
    ("core", "front", "outcome"),
    [
        ("none", "none", "clear text"),
        ("none", "permissive", "clear text"),
        ("none", "strict", "the engine has no TLS"),
        ("permissive", "none", "clear text"),
        ("permissive", "permissive", "encrypted"),
        ("permissive", "strict", "encrypted"),
        ("strict", "none", "the engine requires TLS"),
        ("strict", "permissive", "encrypted"),
        ("strict", "strict", "encrypted"),
    ],
)
def test_two_neighbouring_steps_of_a_change_always_talk(world: World, core: str, front: str, outcome: str) -> None:
    """The steps are none, permissive, strict. Only none and strict, which are two steps apart, refuse each other."""
    world.listen(None if core == "none" else PortTls(world.engine_files(), is_strict=core == "strict"))
    tls = None if front == "none" else world.link_tls(is_strict=front == "strict")
    if outcome.startswith("the"):
        with pytest.raises(ProtocolError, match=outcome):
            world.try_to_connect(tls)
    else:
        assert world.try_to_connect(tls) == (outcome == "encrypted")


def test_a_front_that_ignores_the_offer_is_refused_by_a_strict_core(world: World) -> None:
    """A front of an earlier release does not know the offer of TLS, and an attacker may remove the offer."""
    world.listen(PortTls(world.engine_files(), is_strict=True))

    async def strip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        core_reader, core_writer = await asyncio.open_connection(*world.address.split(":")[1:])
        challenge = core_decoder.decode(await read_frame(core_reader))
        assert isinstance(challenge, FrontChallenge)
        writer.write(frame(FrontChallenge(nonce=challenge.nonce)))
        core_writer.write(await reader.read(65536))
        assert await core_reader.read() == b""
        writer.close()

    async def use(address: str) -> None:
        with pytest.raises(ProtocolError):
            await world.connect(world.link_tls(is_strict=False), address)

    asyncio.run(_through(strip, use))
    assert list(world.inbox.items) == []


def test_an_engine_that_is_not_the_named_one_gets_no_prompt(world: World) -> None:
    other = world.authority.issue("other-engines.default.svc", is_engine=True)
    world.listen(PortTls(world.engine_files(other), is_strict=True))
    with pytest.raises(ProtocolError, match=rf"not valid for '{ENGINE}'.*must be valid now, for the name '{ENGINE}'"):
        world.try_to_connect(world.link_tls())
    assert list(world.inbox.items) == []


def test_without_a_server_name_the_certificate_must_have_the_address(world: World) -> None:
    world.listen(PortTls(world.engine_files(world.authority.issue("127.0.0.1", is_engine=True)), is_strict=True))
    assert world.try_to_connect(replace(world.link_tls(), server_name=""))
    with pytest.raises(ProtocolError, match="certificate is refused: Hostname mismatch"):
        world.try_to_connect(world.link_tls())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("expired", "certificate has expired"), ("other CA", "unable to get local issuer certificate")],
)
def test_an_engine_without_a_valid_certificate_is_refused(world: World, kind: str, reason: str) -> None:
    issued = (
        world.authority.issue(ENGINE, is_engine=True, end=datetime.now(UTC) - DAY / 2)
        if kind == "expired"
        else Authority().issue(ENGINE, is_engine=True)
    )
    world.listen(PortTls(world.engine_files(issued), is_strict=True))
    with pytest.raises(ProtocolError, match=f"the engine's certificate is refused: {reason}"):
        world.try_to_connect(world.link_tls())


@pytest.mark.parametrize(
    ("kind", "front_reads", "core_logs"),
    [
        ("expired", "certificate expired", "certificate has expired"),
        ("other CA", "unknown ca", "unable to get local issuer certificate"),
        ("an engine's", "unsupported certificate", "unsuitable certificate purpose"),
    ],
)
def test_a_gateway_without_a_valid_certificate_is_refused(
    world: World, caplog: pytest.LogCaptureFixture, kind: str, front_reads: str, core_logs: str
) -> None:
    issued = {
        "expired": lambda: world.authority.issue(GATEWAY, is_engine=False, end=datetime.now(UTC) - DAY / 2),
        "other CA": lambda: Authority().issue(GATEWAY, is_engine=False),
        "an engine's": lambda: world.authority.issue(ENGINE, is_engine=True),
    }[kind]()
    world.listen(PortTls(world.engine_files(), is_strict=False))
    with pytest.raises(ProtocolError, match=f"refuses this gateway's certificate: .*{front_reads}"):
        world.try_to_connect(world.link_tls(issued))
    wait_until(lambda: core_logs in caplog.text, 30.0, lambda: caplog.text)
    assert list(world.inbox.items) == []


async def _start_tls(world: World, context: ssl.SSLContext, more: bytes = b"") -> TlsStream:
    """Connects like a front, up to the TLS handshake. `more`: clear text after the front's StartTls."""
    reader, writer = await asyncio.open_connection(*world.address.split(":")[1:])
    await read_frame(reader)
    writer.write(frame(StartTls()) + more)
    return await begin_tls(reader, writer, context, ENGINE)


def test_a_front_without_a_certificate_is_refused(world: World) -> None:
    world.listen(PortTls(world.engine_files(), is_strict=False))
    context = ssl.create_default_context(cadata=world.authority.cert.decode())

    async def knock() -> None:
        stream = await _start_tls(world, context)
        with pytest.raises(TlsRefused, match="certificate required"):
            await read_frame(stream)

    asyncio.run(knock())


def test_clear_text_that_somebody_adds_before_the_handshake_ends_the_connection(world: World) -> None:
    world.listen(PortTls(world.engine_files(), is_strict=True))
    context = world.link_tls().files.context()

    async def inject() -> None:
        with pytest.raises((TlsRefused, asyncio.IncompleteReadError, ConnectionError)):
            await _start_tls(world, context, more=_submit("injected"))

    asyncio.run(inject())
    assert list(world.inbox.items) == []


def test_a_front_that_announces_its_end_and_sends_on_is_disconnected(world: World) -> None:
    world.listen(PortTls(world.engine_files(), is_strict=True))

    async def use() -> None:
        connection = await world.connect(world.link_tls())
        assert isinstance(connection.reader, TlsStream)
        with pytest.raises(ssl.SSLWantReadError):
            connection.reader.session._tls.unwrap()
        connection.writer.write(connection.reader.session.take_outgoing() + bytes(10_000_000))
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(connection.reader._reader.read(), 10.0)  # reads until the connection ends
        connection.writer.transport.abort()

    asyncio.run(use())


def test_a_version_of_tls_before_1_3_is_refused(world: World) -> None:
    world.listen(PortTls(world.engine_files(), is_strict=True))
    context = world.link_tls().files.context()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2

    async def knock() -> None:
        with pytest.raises(TlsRefused, match="protocol version"):
            await _start_tls(world, context)

    asyncio.run(knock())


def test_fronts_that_stall_their_handshake_delay_nobody_and_are_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloom_engine.core_server.front_handshake._HELLO_SECONDS", 1.0)
    world.listen(PortTls(world.engine_files(), is_strict=True))

    async def stall() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*world.address.split(":")[1:])
        await read_frame(reader)
        writer.write(frame(StartTls()) + b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello of 512 bytes
        return reader, writer

    async def use() -> None:
        stalled = [await stall() for _ in range(20)]
        connection = await world.connect(world.link_tls())
        assert await _echo(world, connection, "s") == "s"
        for reader, writer in stalled:
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
            writer.close()
        assert await _echo(world, connection, "t") == "t", "the greeted front stays"
        connection.writer.transport.abort()

    asyncio.run(use())


def test_each_model_of_a_gateway_has_the_name_of_its_own_engines(world: World) -> None:
    """`tls_server_suffix` completes short names that come from engines_dns, and no others."""
    entries = {
        "by-dns": {"engines_dns": "chat-engines:8003"},
        "by-list": {"engines": {"first": "10.0.0.7:8003"}},
        "by-name": {"engines": {"first": "10.0.0.7:8003"}, "tls_server_name": "other-engines.default.svc"},
    }
    usable = parse_models({"version": "v1", "models": {name: {**each, "key": KEY} for name, each in entries.items()}})
    assert usable.problems == ()
    paths = write_tls(
        world.folder / "gateway", "tls", world.authority.issue(GATEWAY, is_engine=False), world.authority.cert
    )
    files = {f"tls_{kind}_file": str(getattr(paths, kind)) for kind in ("cert", "key", "ca")}
    document = {"models_file": "/m", "cache_dir": str(world.folder), "tls_server_suffix": ".default.svc", **files}
    config = parse_gateway_config(document)
    models = RunningModels(config, usable.document, api_url="http://none", tls=link_tls(config.gateway))

    def names(model: str) -> set[str]:
        running = models.models[model]
        running.service.client.set_engines(running._addresses())
        tls = [link.core.tls for link in running.service.client.pool.links.values()]
        return {each.server_name for each in tls if each is not None}

    models.models["by-dns"]._engines = {"10.0.0.8": "10.0.0.8:8003"}  # as a lookup finds them
    assert names("by-dns") == {ENGINE}
    assert names("by-list") == {""}, "the host of the address"
    assert names("by-name") == {"other-engines.default.svc"}


def test_a_renewed_certificate_holds_for_new_connections_and_open_ones_continue(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    soon = datetime.now(UTC) + DAY / 2
    world.listen(PortTls(world.engine_files(world.authority.issue(ENGINE, is_engine=True, end=soon)), is_strict=True))
    tls = world.link_tls()

    def peer_end(connection: CoreConnection) -> object:
        assert isinstance(connection.reader, TlsStream)
        return connection.reader.session.peer_certificate_end

    async def use() -> None:
        before = await world.connect(tls)
        write_tls(
            *(world.folder / "engine", "front_tls", world.authority.issue(ENGINE, is_engine=True), world.authority.cert)
        )
        after = await world.connect(tls)
        assert peer_end(before) != peer_end(after)
        assert await _echo(world, before, "old") == "old"
        assert await _echo(world, after, "new") == "new"
        # The certificate is new, but the key is old, as in the middle of a renewal that copies one file after the
        # other.
        (world.folder / "engine" / "tls.crt").write_bytes(world.authority.issue(ENGINE, is_engine=True).cert)
        for _ in range(2):
            during = await world.connect(tls)
            assert peer_end(during) == peer_end(after)
            during.writer.transport.abort()
        # The CA is new. Both sides trust its certificates after the renewal of all three files.
        other = Authority()
        both = world.authority.cert + other.cert
        write_tls(world.folder / "engine", "front_tls", other.issue(ENGINE, is_engine=True), both)
        write_tls(world.folder / "gateway", "tls", other.issue(GATEWAY, is_engine=False), both)
        renewed = await world.connect(tls)
        assert await _echo(world, renewed, "other CA") == "other CA"
        assert await _echo(world, before, "old again") == "old again"
        for connection in (before, after, renewed):
            connection.writer.transport.abort()

    asyncio.run(use())
    problems = [record.message for record in caplog.records if "stays in use" in record.message]
    assert len(problems) == 1, "it is logged once"
    assert "is not the private key of the certificate in" in problems[0]
