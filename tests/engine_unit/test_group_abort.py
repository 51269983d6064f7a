"""The waits that an Abort ends, and the connections that an Abort shuts down. test_lost_peers.py has real ranks."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.parallel.gloo_connections import Ends, find_connections, shared_ends, socket_inodes
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.protocol.channel import Channel, ChannelClosed, encode
from rayloom_engine.protocol.ranks import AbortOrders


class WaitsOfTest:
    def __init__(self) -> None:
        self.is_aborted = False
        self.is_released = False

    def abort(self) -> None:
        assert not self.is_released
        self.is_aborted = True

    def release(self) -> None:
        self.is_released = True


def test_an_abort_ends_every_wait_of_the_group() -> None:
    group, first, second = GroupAbort(), WaitsOfTest(), WaitsOfTest()
    group.begin(3)
    group.add(first)
    group.add(second)
    assert group.abort(3)
    assert (first.is_aborted, second.is_aborted) == (True, True)


def test_a_late_abort_of_an_earlier_group_does_nothing() -> None:
    group, earlier, present = GroupAbort(), WaitsOfTest(), WaitsOfTest()
    group.begin(3)
    group.add(earlier)
    group.begin(7)
    group.add(present)
    assert not group.abort(6)
    assert (earlier.is_released, earlier.is_aborted, present.is_aborted) == (True, False, False)


def test_an_abort_that_arrives_during_the_join_ends_the_group_that_is_joined() -> None:
    group, waits = GroupAbort(), WaitsOfTest()
    group.begin(3)
    assert not group.abort(3)
    group.add(waits)
    assert waits.is_aborted


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=30))
def test_a_group_is_aborted_only_by_an_abort_of_its_own_or_a_later_order(events: list[tuple[bool, int]]) -> None:
    """Each event is a Join or an Abort.

    A Join has a later ticket than all earlier events. An Abort has the last ticket, or one of the two before it.
    """
    group, waits, last, aborted = GroupAbort(), WaitsOfTest(), 0, -1
    joined = last
    group.begin(last)
    group.add(waits)
    for is_join, number in events:
        if is_join:
            last += number
            joined, waits = last, WaitsOfTest()
            group.begin(joined)
            group.add(waits)
        else:
            ticket = last + 1 - number
            aborted = max(aborted, ticket)
            group.abort(ticket)
        assert waits.is_aborted == (joined <= aborted)
        assert not waits.is_released


ends = st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.sampled_from("ab"), st.integers(1, 4))


@given(st.lists(ends), st.lists(ends))
def test_a_connection_counts_if_a_peer_has_its_other_end(own: list[Ends], others: list[Ends]) -> None:
    found = shared_ends(own, others)
    assert found == {(a, b, c, d) for a, b, c, d in own if (c, d, a, b) in others}


class StoreOfTest:
    """A store with the connections that the peer, rank 1, has written."""

    def __init__(self, of_peer: list[Ends]) -> None:
        self._of_peer = of_peer
        self.written: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.written[key] = value

    def get(self, key: str) -> bytes:
        assert key == "connections/1"
        return json.dumps(self._of_peer).encode()


def test_only_connections_between_the_ranks_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        earlier = socket_inodes()
        pairs = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for _ in range(2)]
    (between, peer), (other, others_peer) = pairs
    store = StoreOfTest([(*peer.getsockname(), *peer.getpeername())])
    connections = find_connections(earlier, store, rank=0, world_size=2)
    assert len(connections) == 1
    assert len(json.loads(store.written["connections/0"])) == 4, "this process has both ends"
    connections.abort()
    assert between.recv(1) == b"", "a wait of the descriptor's other owner ends"
    assert peer.recv(1) == b""
    other.sendall(b"x")
    assert others_peer.recv(1) == b"x"
    connections.release()
    connections.abort()
    for pair in pairs:
        for connection in pair:
            connection.close()


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(1, 30), max_size=5))
def test_an_abort_arrives_as_it_was_sent_however_it_is_cut(ticket: int, cuts: list[int]) -> None:
    here, there = socket.socketpair()
    with here, there:
        data = encode(AbortOrders(ticket))
        for cut in cuts:
            here.sendall(data[:cut])
            data = data[cut:]
        here.sendall(data)
        assert Channel(there).expect(AbortOrders, 5.0) == AbortOrders(ticket)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_abort_end_the_channel(body: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(len(body).to_bytes(4, "big") + body)
        with pytest.raises(ChannelClosed):
            Channel(there).expect(AbortOrders, 5.0)
