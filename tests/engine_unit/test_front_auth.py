"""Fronts over TCP: proofs of the key, several fronts at once, and peers with the previous protocol version."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core_server.sockets import CoreIo, Disconnected, GatewayConnected, GatewayPort, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.core_link.handshake import CoreAddress, CoreConnection, ProtocolError, connect
from rayloom_engine.protocol.framing import core_decoder, frame, front_decoder, read_frame
from rayloom_engine.protocol.front_auth import common_version, core_proof, front_proof
from rayloom_engine.protocol.front_key import load_front_key
from rayloom_engine.protocol.messages import (
    PROTOCOL_VERSION,
    CoreStatus,
    Draining,
    FrontChallenge,
    Hello,
    Outputs,
    SequenceOutput,
    Submit,
    Welcome,
)
from rt_server import wait_until

KEY = "0123456789abcdef0123456789abcdef"
NEXT = PROTOCOL_VERSION + 1  # the version of a later release, which also speaks the current version


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(deque(), threading.Event())


@pytest.fixture
def io(tmp_path: Path, inbox: Inbox) -> Iterator[tuple[CoreIo, str]]:
    """A core's sockets, and the address of its port for gateways."""
    listener = socket.create_server(("127.0.0.1", 0))
    status = CoreState(epoch=7, executor="uni").status
    io = CoreIo(f"unix:{tmp_path}/core.sock", "secret", inbox, status, gateways=GatewayPort(listener, KEY))
    io.start()
    yield io, f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    io.stop()
    listener.close()


def _submit(name: str) -> bytes:
    return frame(Submit(sequence_id=name, prompt_ids=(1,), params=DecodingParams(max_tokens=3), attempt=2))


def test_a_front_with_the_key_is_welcome_over_tcp(io: tuple[CoreIo, str], inbox: Inbox) -> None:
    async def talk() -> Welcome:
        connection = await connect(CoreAddress(io[1], KEY, "gateway-1"))
        connection.writer.write(_submit("s"))
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 2, 30.0, lambda: str(inbox.items))
        connection.writer.close()
        return connection.welcome

    welcome = asyncio.run(talk())
    assert (welcome.epoch, welcome.version) == (7, 4)
    (first, begin), (second, submit), *_ = inbox.take()
    assert isinstance(begin, GatewayConnected), "the core counts the requests of this connection"
    assert first == second
    assert isinstance(submit, Submit)
    assert submit.attempt == 2


def test_a_front_with_another_key_is_refused_and_says_so(io: tuple[CoreIo, str], inbox: Inbox) -> None:
    with pytest.raises(ProtocolError, match="both need the same key"):
        asyncio.run(connect(CoreAddress(io[1], "another key, as long as that one")))
    assert inbox.take() == []


def test_a_front_tries_the_previous_key_at_a_core_that_still_has_it(io: tuple[CoreIo, str], inbox: Inbox) -> None:
    async def talk() -> int:
        newer = CoreAddress(io[1], "the key that is not there yet", "gateway-1", old_token=KEY)
        connection = await connect(newer)
        connection.writer.close()
        return connection.welcome.epoch

    assert asyncio.run(talk()) == 7
    neither = CoreAddress(io[1], "the key that is not there yet", old_token="another key, as long as that one")
    with pytest.raises(ProtocolError, match="both need the same key"):
        asyncio.run(connect(neither))


async def _serve_once(core: Any, use: Any) -> Any:
    """Returns the result of `use(address)`, while `core(reader, writer)` serves the connection to this address."""
    server = await asyncio.start_server(core, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        return await use(f"tcp:{host}:{port}")


def test_a_process_without_the_key_cannot_pass_as_the_core() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(FrontChallenge(nonce="n")))
        await read_frame(reader)
        writer.write(frame(Welcome(epoch=1, pid=1, version=4, proof="guessed")))

    with pytest.raises(ProtocolError, match="does not have the key"):
        asyncio.run(_serve_once(impostor, lambda address: connect(CoreAddress(address, KEY))))


def test_the_key_is_never_on_the_wire(io: tuple[CoreIo, str]) -> None:
    sent = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An attacker between front and core, who records both directions."""
        _, host, port = io[1].split(":")
        to_core = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sent.extend(data)
                target.write(data)

        await asyncio.gather(copy(reader, to_core[1]), copy(to_core[0], writer))

    async def use(address: str) -> None:
        connection = await connect(CoreAddress(address, KEY))
        await read_frame(connection.reader)
        connection.writer.transport.abort()

    asyncio.run(_serve_once(relay, use))
    assert b"challenge" in sent
    assert b"welcome" in sent
    assert KEY.encode() not in sent


def test_a_front_of_the_next_version_is_welcome_if_it_speaks_the_one_before(io: tuple[CoreIo, str]) -> None:
    async def talk() -> Welcome:
        _, host, port = io[1].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        challenge = core_decoder.decode(await read_frame(reader))
        assert isinstance(challenge, FrontChallenge)
        chosen = common_version(challenge.version, ours=NEXT, oldest=NEXT - 1)
        assert chosen == PROTOCOL_VERSION
        hello = Hello(front_id="gateway-1", version=chosen, nonce="m")
        proven = msgspec.structs.replace(hello, proof=front_proof(KEY, challenge.nonce, hello))
        data = msgspec.msgpack.encode({**msgspec.to_builtins(proven), "a_field_of_the_next_version": 1})
        writer.write(len(data).to_bytes(4, "big") + data)
        welcome = core_decoder.decode(await read_frame(reader))
        assert isinstance(welcome, Welcome)
        assert welcome.proof == core_proof(KEY, challenge.nonce, "m", welcome)
        writer.close()
        return welcome

    assert asyncio.run(asyncio.wait_for(talk(), 60.0)).version == PROTOCOL_VERSION


@pytest.mark.parametrize("newest", [PROTOCOL_VERSION, NEXT])
def test_a_front_speaks_its_version_with_a_core_of_the_next_one(newest: int) -> None:
    hellos: list[Hello] = []

    async def core(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = msgspec.msgpack.encode({"type": "challenge", "nonce": "n", "version": newest, "a_new_field": [1]})
        writer.write(len(data).to_bytes(4, "big") + data)
        hello = front_decoder.decode(await read_frame(reader))
        assert isinstance(hello, Hello)
        assert hello.proof == front_proof(KEY, "n", hello)
        hellos.append(hello)
        welcome = Welcome(epoch=1, pid=1, version=hello.version)
        proof = core_proof(KEY, "n", hello.nonce, welcome)
        writer.write(frame(msgspec.structs.replace(welcome, proof=proof)))

    connection: CoreConnection = asyncio.run(_serve_once(core, lambda address: connect(CoreAddress(address, KEY))))
    assert hellos[0].version == connection.welcome.version == PROTOCOL_VERSION


def test_a_core_that_is_too_old_is_named_with_the_versions_that_are_spoken() -> None:
    async def core(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(FrontChallenge(nonce="n", version=3)))

    with pytest.raises(ProtocolError, match="the core speaks protocol 3, this front 4 to 4"):
        asyncio.run(_serve_once(core, lambda address: connect(CoreAddress(address, KEY))))


@pytest.mark.parametrize(("theirs", "common"), [(2, None), (3, 3), (4, 4), (5, 4)])
def test_the_newest_common_version_is_spoken(theirs: int, common: int | None) -> None:
    assert common_version(theirs, ours=4, oldest=3) == common


def test_only_the_engines_own_front_can_say_that_it_drains(tmp_path: Path, inbox: Inbox) -> None:
    state = CoreState(epoch=1, executor="uni")
    listener = socket.create_server(("127.0.0.1", 0))
    io = CoreIo(
        f"unix:{tmp_path}/core.sock",
        "secret",
        inbox,
        state.status,
        gateways=GatewayPort(listener, KEY),
        on_front_report=state.record_front_report,
    )
    io.start()

    async def talk() -> None:
        gateway = await connect(CoreAddress(f"tcp:127.0.0.1:{listener.getsockname()[1]}", KEY))
        gateway.writer.write(frame(Draining(True)))
        while await gateway.reader.read(65536):
            pass  # the core ends this connection
        assert not state.is_draining
        second = await connect(CoreAddress(f"tcp:127.0.0.1:{listener.getsockname()[1]}", KEY))
        own = await connect(CoreAddress(f"unix:{tmp_path}/core.sock", "secret"))
        own.writer.write(frame(Draining(True)))
        status = core_decoder.decode(await read_frame(second.reader))
        while not (isinstance(status, CoreStatus) and status.is_draining):
            status = core_decoder.decode(await read_frame(second.reader))
        for connection in (second, own):
            connection.writer.close()

    asyncio.run(asyncio.wait_for(talk(), 60.0))
    io.stop()


def test_a_peer_that_leaves_before_it_is_accepted_is_no_error(
    tmp_path: Path, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for _ in range(3):
        left = socket.create_connection(listener.getsockname())
        # With this option the connection ends with RST instead of FIN. The accepted socket then has no peer.
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.close()
    status = CoreState(epoch=7, executor="uni").status
    io = CoreIo(f"unix:{tmp_path}/core.sock", "secret", inbox, status, gateways=GatewayPort(listener, KEY))
    io.start()

    async def talk() -> Welcome:
        connection = await connect(CoreAddress(f"tcp:127.0.0.1:{listener.getsockname()[1]}", KEY))
        connection.writer.close()
        return connection.welcome

    assert asyncio.run(asyncio.wait_for(talk(), 60.0)).epoch == 7
    io.stop()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_several_fronts_do_not_disturb_each_other(io: tuple[CoreIo, str], inbox: Inbox) -> None:
    async def talk() -> list[bytes]:
        first, second, third = [await connect(CoreAddress(io[1], KEY, f"gateway-{number}")) for number in range(3)]
        for name, connection in (("a", first), ("b", second)):
            connection.writer.write(_submit(name))
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 5, 30.0, lambda: str(inbox.items))
        third.writer.write(b"\x00\x00\x00\x02??")
        first.writer.transport.abort()
        await asyncio.to_thread(wait_until, lambda: len(inbox.items) == 7, 30.0, lambda: str(inbox.items))
        owner = {message.sequence_id: number for number, message in inbox.items if isinstance(message, Submit)}
        for name, number in owner.items():
            io[0].send(number, Outputs((SequenceOutput(sequence_id=name, token_ids=(9,), attempt=2),)))
        frames = [await read_frame(second.reader)]
        while b"outputs" not in frames[-1]:
            frames.append(await read_frame(second.reader))
        second.writer.close()
        return frames

    last = core_decoder.decode(asyncio.run(talk())[-1])
    assert last == Outputs((SequenceOutput(sequence_id="b", token_ids=(9,), attempt=2),))
    kinds = [type(message) for _, message in inbox.take()]
    assert kinds.count(Disconnected) >= 2


def test_a_port_for_gateways_needs_a_key_of_some_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="front_key_file: front_port is 7000, so a key is needed"):
        parse_config({"front_port": 7000})
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(ConfigError, match="has 5 characters, at least 16 are needed"):
        load_front_key(str(tmp_path / "key"), "front_key_file")
