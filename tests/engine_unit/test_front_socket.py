"""The core's end of a front's connection: messages that wait, messages of two threads, and a front that is gone."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core_server.front_socket import FrontSocket
from rayloom_engine.core_server.unsent import Unsent


def test_the_oldest_unsent_message_is_judged_and_a_byte_now_and_then_is_no_excuse() -> None:
    unsent = Unsent(stall_seconds=30.0)
    assert not unsent.has_stalled(100.0)
    unsent.keep(memoryview(bytes(1024)), 100.0)  # due at 130.001
    unsent.keep(memoryview(bytes(1024)), 120.0)
    for now in (129.0, 130.0):
        unsent.sent(1)
        assert not unsent.has_stalled(now)
    assert unsent.has_stalled(130.1)
    unsent.sent(1022)
    assert not unsent.has_stalled(130.1), "the first message is taken, the second is due at 150.002"
    assert unsent.has_stalled(150.1)
    unsent.sent(1024)
    assert not unsent.has_stalled(150.1)
    assert unsent.num_bytes == 0


def test_a_front_that_reads_a_large_answer_steadily_stays() -> None:
    unsent = Unsent(stall_seconds=30.0)
    megabyte = 2**20
    for _ in range(90):
        unsent.keep(memoryview(bytes(megabyte)), 0.0)
    for second in range(60):
        assert not unsent.has_stalled(float(second))
        unsent.sent(megabyte)
    # The front stops reading: the 61st message was due after 30 s and 61 s.
    assert not unsent.has_stalled(91.0)
    assert unsent.has_stalled(91.1)


@pytest.fixture
def pair() -> Iterator[tuple[FrontSocket, socket.socket]]:
    """The core's end of a connection, and the front's socket."""
    ours, theirs = socket.socketpair()
    sending = FrontSocket(ours, stall_seconds=30.0)
    yield sending, theirs
    sending.close()
    theirs.close()


def _read(theirs: socket.socket, num: int) -> bytes:
    data = b""
    while len(data) < num:
        data += theirs.recv(num - len(data))
    return data


def test_the_socket_takes_a_small_message_at_once(pair: tuple[FrontSocket, socket.socket]) -> None:
    sending, theirs = pair
    assert not sending.send(b"abc", 0.0)
    assert sending.num_unsent == 0
    assert _read(theirs, 3) == b"abc"


def test_what_a_slow_front_does_not_take_is_kept_in_order_and_blocks_nobody(
    pair: tuple[FrontSocket, socket.socket],
) -> None:
    sending, theirs = pair
    large = bytes(range(256)) * 2**14  # 4 MiB: more than the socket holds
    assert sending.send(large, 0.0), "the caller must call flush from now on"
    assert 0 < sending.num_unsent < len(large)
    assert not sending.send(b"second", 1.0), "flush is called already"
    assert not sending.flush(), "the socket is full"
    assert not sending.has_stalled(30.0)
    assert sending.has_stalled(40.0)
    got = b""
    while not sending.flush():
        got += theirs.recv(2**20)
    got += _read(theirs, len(large) + len(b"second") - len(got))
    assert got == large + b"second"
    assert not sending.send(b"third", 2.0)
    assert _read(theirs, 5) == b"third"


def test_a_front_that_is_gone_takes_nothing_more_and_breaks_nothing(pair: tuple[FrontSocket, socket.socket]) -> None:
    sending, theirs = pair
    sending.send(bytes(2**22), 0.0)
    theirs.close()
    assert sending.flush(), "nothing is kept for it"
    assert not sending.send(b"more", 1.0)
    assert not sending.has_stalled(1000.0)


def test_an_abort_ends_the_connection_for_the_front(pair: tuple[FrontSocket, socket.socket]) -> None:
    sending, theirs = pair
    sending.send(b"last", 0.0)
    sending.abort()
    assert theirs.recv(100) == b"last"
    assert theirs.recv(100) == b""
    assert not sending.send(bytes(2**22), 0.0)
    assert sending.num_unsent == 0


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=8), read_size=st.integers(1000, 300_000))
def test_messages_of_two_threads_arrive_whole(sizes: list[int], read_size: int) -> None:
    """One thread sends the even numbers, another the odd numbers. Each message is filled with its number."""
    ours, theirs = socket.socketpair()
    sending = FrontSocket(ours, stall_seconds=30.0)

    def send(first: int) -> None:
        for number in range(first, len(sizes), 2):
            sending.send(sizes[number].to_bytes(4, "big") + bytes([number]) * sizes[number], 0.0)

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    data = bytearray()
    while len(data) < sum(sizes) + 4 * len(sizes):
        sending.flush()
        if select.select([theirs], [], [], 0.001)[0]:
            data += theirs.recv(read_size)
    for thread in threads:
        thread.join()
    numbers = []
    while data:
        size = int.from_bytes(data[:4], "big")
        numbers.append(data[4])
        assert data[4 : 4 + size] == bytes([numbers[-1]]) * size
        del data[: 4 + size]
    assert [n for n in numbers if n % 2 == 0] + [n for n in numbers if n % 2] == [
        *range(0, len(sizes), 2),
        *range(1, len(sizes), 2),
    ]
    sending.close()
    theirs.close()
