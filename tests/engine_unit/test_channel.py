"""A channel between two processes: messages, and errors at the channel's end.

Messages and errors are the same over shared memory and over TCP alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.core.embeds import MAX_WAITING_EMBEDS_BYTES
from rayloom_engine.protocol import channel as channel_module
from rayloom_engine.protocol.channel import Channel, ChannelClosed, dial, welcome
from rayloom_engine.protocol.ranks import Failed, Fence, Greeting, Welcomed
from rt_fake_rank import TOKEN, make_listener
from rt_server import wait_until

RING_BYTES = 1024 * 1024


def message(number: int, num_bytes: int = 10) -> Failed:
    return Failed(number, "rank", "x" * num_bytes)


def _echo(port: int) -> None:
    """A rank's process that echoes messages. At Fence(n) it sends n messages and then stops, like a hung rank."""
    steps, _ = dial(f"127.0.0.1:{port}", TOKEN, Greeting(role="steps", proof=""))
    while True:
        heard = steps.receive()
        if isinstance(heard, Fence):
            for number in range(heard.rank):
                steps.send(message(number))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            steps.send(heard)


class Peer:
    """A rank in another process, with the core's end of its channel."""

    def __init__(self, is_shared: bool) -> None:
        listener, port = make_listener()
        self.process: Any = multiprocessing.get_context("spawn").Process(target=_echo, args=(port,), daemon=True)
        self.process.start()
        with listener:
            connection, _ = listener.accept()
        self.channel, _ = welcome(connection, TOKEN)
        if is_shared:
            self.channel.offer_memory()
        self.channel.send(Welcomed())

    def end(self) -> None:
        self.process.kill()
        self.process.join(60.0)
        self.channel.close()


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    peer = Peer(request.param)
    assert peer.channel.transport == ("shared memory" if request.param else "TCP")
    yield peer
    peer.end()


def test_a_tcp_connection_notices_a_host_that_lost_power() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as end:
        Channel(end)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
        assert [end.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [5, 5, 3, 20_000]


def test_messages_of_every_size_arrive_whole_and_in_order(peer: Peer) -> None:
    # The messages fill the ring several times, and some are larger than the ring.
    sizes = [*range(1, 2000, 97), RING_BYTES // 2, RING_BYTES, 3 * RING_BYTES, 5, RING_BYTES - 100, 7] * 3
    sent = [message(number, size) for number, size in enumerate(sizes)]

    def send_all() -> None:
        for one in sent:
            peer.channel.send(one)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [peer.channel.receive() for _ in sent] == sent  # a time-out would also apply to the sending thread
    sender.join(30.0)


def test_messages_sent_before_the_end_are_received_before_it(peer: Peer) -> None:
    peer.channel.send(Fence(5, None))
    assert peer.channel.receive(10.0) == message(0)
    wait_until(lambda: _state(peer.process.pid) == "T", 30.0, lambda: "it runs on")
    assert not peer.channel.has_ended
    peer.process.kill()
    peer.process.join(60.0)
    assert [peer.channel.receive(30.0) for _ in range(4)] == [message(number) for number in range(1, 5)]
    with pytest.raises(ChannelClosed):
        peer.channel.receive(30.0)
    assert peer.channel.has_ended
    with pytest.raises(ChannelClosed):  # the kernel may still accept the first message after the end
        for _ in range(2):
            peer.channel.send(message(0))


def test_a_stopped_peer_stops_no_sender_for_longer_than_the_limit(peer: Peer) -> None:
    peer.channel.limit_sends(0.5)
    peer.channel.send(Fence(0, None))
    wait_until(lambda: _state(peer.process.pid) == "T", 30.0, lambda: "it runs on")
    began = time.monotonic()
    with pytest.raises(ChannelClosed):
        for number in range(1000):
            peer.channel.send(message(number, RING_BYTES // 10))
    assert time.monotonic() - began < 20.0


def test_the_embeddings_that_may_wait_for_a_rank_block_no_sender(peer: Peer) -> None:
    peer.channel.limit_sends(5.0)
    peer.channel.send(Fence(0, None))
    wait_until(lambda: _state(peer.process.pid) == "T", 30.0, lambda: "it runs on")
    peer.channel.send(message(0, MAX_WAITING_EMBEDS_BYTES))  # raises if it is not sent within the limit


def test_a_time_out_is_not_the_end_of_the_peer(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.channel.receive(0.05)
    peer.channel.send(message(1))
    assert peer.channel.receive(10.0) == message(1)


def test_closing_frees_a_thread_that_receives(peer: Peer) -> None:
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises(ChannelClosed):
            peer.channel.receive()
        ended.set()

    threading.Thread(target=receive, daemon=True).start()
    peer.channel.close()
    assert ended.wait(30.0)


def test_nothing_is_left_of_a_channel() -> None:
    before = _open_files()
    for is_refused in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if is_refused:
                patch.setattr(channel_module, "open_memory", lambda *_: None)
            ours, theirs = _pair()
        assert ours.transport == theirs.transport == ("TCP" if is_refused else "shared memory")
        theirs.send(message(1))
        assert ours.receive(30.0) == message(1)
        ours.close()
        theirs.close()
    assert _open_files() <= before  # descriptors of other tests may have been closed meanwhile


@pytest.mark.parametrize("changed", [{"pid": 2**22 + 1}, {"name": "rayloom-of-another"}, {"memory_fd": 100_000}])
def test_memory_that_is_not_the_cores_is_not_used(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's process id is unknown or belongs to another process, as it may in another container."""
    real = channel_module.open_memory
    monkeypatch.setattr(
        channel_module,
        "open_memory",
        lambda offer, fd: real(channel_module.msgspec.structs.replace(offer, **changed), fd),
    )
    ours, theirs = _pair()
    assert ours.transport == theirs.transport == "TCP"
    ours.close()
    theirs.close()


def test_peers_of_other_addresses_are_offered_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "make_memory", lambda _: pytest.fail("memory was made"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        here = Channel(listener.accept()[0])
    here.offer_memory()
    here.close()
    there.close()


def _pair() -> tuple[Channel, Channel]:
    """The core's and the rank's end of a channel in this process."""
    listener, port = make_listener()
    dialled: list[Channel] = []
    rank = threading.Thread(
        target=lambda: dialled.append(dial(f"127.0.0.1:{port}", TOKEN, Greeting(role="steps", proof=""))[0])
    )
    rank.start()
    with listener:
        core, _ = welcome(listener.accept()[0], TOKEN)
    core.offer_memory()
    core.send(Welcomed())
    rank.join(30.0)
    return core, dialled[0]


def _open_files() -> set[str]:
    """The targets of this process's descriptors. Memory files, pipes and sockets have unique names."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # for example, the listing's own descriptor is closed by now
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
