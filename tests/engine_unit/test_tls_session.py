"""TlsSession: messages of two threads through TLS, in both directions at once, and invalid bytes from the peer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core_server.front_socket import FrontSocket
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.protocol.tls.session import TlsSession
from rayloom_engine.protocol.tls.stream import TlsRefused, TlsStream
from rt_tls import Authority, write_tls


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of an engine and of a gateway."""
    folder, authority = tmp_path_factory.mktemp("tls"), Authority()
    engine = write_tls(folder / "engine", "front_tls", authority.issue("engine", is_engine=True), authority.cert)
    gateway = write_tls(folder / "gateway", "tls", authority.issue("gateway", is_engine=False), authority.cert)
    return TlsFiles(engine, is_server=True).context(), TlsFiles(gateway, is_server=False).context()


def _pair(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> tuple[TlsSession, TlsSession]:
    """The two sides of a connection after the handshake."""
    engine, gateway = TlsSession(contexts[0]), TlsSession(contexts[1], "engine")
    is_complete = False
    while not is_complete:
        gateway.shake_hands(engine.take_outgoing())
        is_complete = engine.shake_hands(gateway.take_outgoing())
    return engine, gateway


def test_what_one_side_seals_the_other_side_opens(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    engine, gateway = _pair(contexts)
    large = bytes(range(256)) * 2**14  # 4 MiB: many records of TLS
    for sender, receiver in ((engine, gateway), (gateway, engine)):
        sealed = sender.seal(b"small") + sender.seal(large)
        assert b"small" not in sealed
        parts = [sealed[start : start + 100_000] for start in range(0, len(sealed), 100_000)]
        assert b"".join(map(receiver.open, parts)) == b"small" + large
        assert not receiver.has_outgoing
    assert engine.seal(b"") == b""


def test_changed_bytes_are_an_error_and_no_message(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    engine, gateway = _pair(contexts)
    sealed = bytearray(engine.seal(b"tokens"))
    sealed[-1] ^= 1
    with pytest.raises(ssl.SSLError, match="bad record mac"):
        gateway.open(bytes(sealed))


def test_the_engine_gives_out_no_ticket_for_a_session(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """A resumed session would not show the gateway's certificate again."""
    engine, gateway = _pair(contexts)
    assert engine.take_outgoing() == b""
    assert gateway.open(engine.seal(b"x")) == b"x"
    assert gateway._tls.session is None or not gateway._tls.session.has_ticket


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=8), read_size=st.integers(1000, 300_000))
def test_messages_of_two_threads_arrive_whole_while_the_peer_sends(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], sizes: list[int], read_size: int
) -> None:
    """Two threads send messages like the core, and a third decrypts the gateway's messages like the I/O thread."""
    engine, gateway = _pair(contexts)
    ours, theirs = socket.socketpair()
    sending = FrontSocket(ours, stall_seconds=30.0, tls=engine)
    from_gateway = [gateway.seal(bytes([number]) * 1000) for number in range(200)]
    opened = bytearray()

    def send(first: int) -> None:
        for number in range(first, len(sizes), 2):
            sending.send(sizes[number].to_bytes(4, "big") + bytes([number]) * sizes[number], 0.0)

    def receive() -> None:
        for sealed in from_gateway:
            opened.extend(engine.open(sealed))

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
    threads.append(threading.Thread(target=receive))
    for thread in threads:
        thread.start()
    theirs.settimeout(0.001)
    data = bytearray()
    while len(data) < sum(sizes) + 4 * len(sizes):
        sending.flush()
        try:
            data += gateway.open(theirs.recv(read_size))
        except TimeoutError:
            continue
    for thread in threads:
        thread.join()
    numbers = []
    while data:
        size = int.from_bytes(data[:4], "big")
        numbers.append(data[4])
        assert data[4 : 4 + size] == bytes([numbers[-1]]) * size
        del data[: 4 + size]
    assert [n for n in numbers if n % 2 == 0] == list(range(0, len(sizes), 2))
    assert [n for n in numbers if n % 2] == list(range(1, len(sizes), 2))
    assert opened == b"".join(bytes([number]) * 1000 for number in range(200))
    sending.close()
    theirs.close()


def test_a_socket_sends_an_answer_of_tls_itself_and_nothing_if_there_is_none(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path
) -> None:
    engine, gateway = _pair(contexts)
    ours, theirs = socket.socketpair()
    sending = FrontSocket(ours, stall_seconds=30.0, tls=engine)
    theirs.setblocking(False)
    assert not sending.send(b"", 0.0)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    sealed = bytearray(gateway.seal(b"x"))
    sealed[-1] ^= 1
    with pytest.raises(ssl.SSLError):
        engine.open(bytes(sealed))
    assert engine.has_outgoing, "the alert"
    sending.send(b"", 0.0)
    with pytest.raises(ssl.SSLError, match="alert bad record mac"):
        gateway.open(theirs.recv(1000))
    sending.close()
    theirs.close()


@pytest.mark.parametrize("kind", ["garbage", "an alert"])
def test_a_send_after_a_failed_read_ends_the_connection_as_if_the_peer_were_gone(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], kind: str
) -> None:
    engine, gateway = _pair(contexts)
    ours, theirs = socket.socketpair()
    sending = FrontSocket(ours, stall_seconds=30.0, tls=engine)
    wrong = b"no record of TLS at all"
    if kind == "an alert":
        with pytest.raises(ssl.SSLError):
            gateway.open(wrong)
        wrong = gateway.take_outgoing()
    with pytest.raises(ssl.SSLError):
        engine.open(wrong)
    with pytest.raises(ssl.SSLError):
        engine.seal(b"tokens")
    assert not sending.send(b"tokens", 0.0)
    assert not sending.send(b"more tokens", 0.0)
    assert sending.num_unsent == 0
    theirs.settimeout(5.0)
    while theirs.recv(1000):  # perhaps an alert, and then the end
        pass
    sending.close()
    theirs.close()


def close_notify(session: TlsSession) -> bytes:
    """Returns the bytes by which `session` ends its direction of the connection."""
    with pytest.raises(ssl.SSLWantReadError):
        session._tls.unwrap()
    return session.take_outgoing()


@pytest.mark.parametrize("receiver", [0, 1], ids=["engine", "gateway"])
def test_after_the_end_that_the_peer_announces_no_byte_is_kept(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], receiver: int
) -> None:
    pair = _pair(contexts)
    here, there = pair[receiver], pair[1 - receiver]
    assert here.open(there.seal(b"last") + close_notify(there)) == b"last"
    assert here.has_ended
    for _ in range(160):
        assert here.open(bytes(64 * 1024)) == b""
    assert here._incoming.pending == 0

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(64 * 1024))
        stream = TlsStream(reader, here, lambda data: None)
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(stream.readexactly(1), 5.0)

    asyncio.run(read())


def test_a_stream_that_is_broken_sends_nothing(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    _, gateway = _pair(contexts)

    async def use() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"no record of TLS at all")
        sent: list[bytes] = []
        stream = TlsStream(reader, gateway, sent.append)
        with pytest.raises(TlsRefused):
            await stream.readexactly(1)
        stream.write(b"a prompt")
        assert sent == []

    asyncio.run(use())
