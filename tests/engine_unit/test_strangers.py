"""Strangers (connections before their greeting): the core disconnects some of them, and ranks attach meanwhile."""

from __future__ import annotations

import contextlib
import socket

from rayloom_engine.core_server.ranks.strangers import crowded_out
from rayloom_engine.protocol.channel import Channel
from rt_fake_rank import Ranks


def test_the_oldest_goes_when_there_are_too_many() -> None:
    hosts = [f"10.0.0.{number}" for number in range(65)]
    assert crowded_out(hosts[:64]) is None
    assert crowded_out(hosts) == 0


def test_a_flood_from_one_address_costs_that_address_alone() -> None:
    hosts = ["a", *["flood"] * 48]
    assert crowded_out(hosts) is None
    assert crowded_out([*hosts, "flood"]) == 1
    assert crowded_out([*hosts, "b"]) is None


def test_ranks_are_greeted_at_once_under_a_flood_of_silent_connections() -> None:
    ranks = Ranks()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", ranks.port), timeout=30.0))
        # A rank gives up its connection after 5 s. A core that serves 64 strangers at a time, each for 5 s, would make
        # the rank wait 15 s.
        ranks.start(0)
        ranks.start(1)
        epoch, _ = ranks.assemble()
    assert epoch == 1


def test_a_silent_stranger_is_disconnected_before_its_handshake_time_is_over() -> None:
    ranks = Ranks()
    with socket.create_connection(("127.0.0.1", ranks.port), timeout=4.0) as connection:
        Channel(connection).receive(4.0)
        connection.settimeout(4.0)
        assert connection.recv(1) == b"", "within 4 s; one that drips a greeting has 5"
