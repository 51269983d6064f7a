"""Bodies that arrive slowly: the limit on their total time, and the state of their connections in ConnectionTable."""

from __future__ import annotations

import asyncio

from rayloom_engine.front.http.connections import ConnectionTable
from rt_protocol import connection, settle

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
KIB = 1024


def test_a_body_of_three_bytes_has_30_s_in_all() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        protocol.data_received(POST % 9)
        for second in (10.0, 20.0, 29.0):
            clock.advance(second)
            protocol.data_received(b"a")
        clock.advance(29.99)
        assert wire.written == b""
        clock.advance(30.01)
        assert wire.written.startswith(b"HTTP/1.1 408 ")
        assert b"the request's body was too slow: each part must come within 30 s" in wire.written

    asyncio.run(scenario())


def test_a_body_that_comes_at_the_least_rate_has_the_time_for_its_size() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        protocol.data_received(POST % (60 * 256 * KIB))
        for number in range(1, 58):  # 57 parts of 256 KiB, one every 1.5 s; the last at 85.5 s (limit: 30 + 56)
            clock.advance(1.5 * number)
            protocol.data_received(b"a" * 256 * KIB)
            await settle()
        assert wire.written == b""
        clock.advance(86.9)
        assert wire.written == b""
        clock.advance(87.1)
        assert wire.written.startswith(b"HTTP/1.1 408 ")

    asyncio.run(scenario())


def test_a_loop_that_stood_still_gives_a_body_its_time_back() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        protocol.data_received(POST % 3)
        clock.stand_still(40.0)
        protocol.data_received(b"a")
        clock.advance(40.9)
        assert wire.written == b""
        protocol.data_received(b"aa")
        await settle()
        assert wire.written.startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())


def test_a_connection_without_its_whole_body_makes_room() -> None:
    async def scenario() -> None:
        table = ConnectionTable(2)
        (_, drip_wire, drip), (_, whole_wire, whole) = connection(table), connection(table)
        drip.data_received(POST % 9 + b"a")
        whole.data_received(POST % 1 + b"a")
        _, new_wire, _ = connection(table)
        assert (drip_wire.is_closed, whole_wire.is_closed, new_wire.is_closed) == (True, False, False)
        await settle()
        assert whole_wire.written.startswith(b"HTTP/1.1 200 ")

    asyncio.run(scenario())


def test_a_body_that_comes_fast_is_not_the_first_to_make_room() -> None:
    async def scenario() -> None:
        table = ConnectionTable(2)
        (_, fast_wire, fast), (drip_clock, drip_wire, drip) = connection(table), connection(table)
        fast.data_received(POST % (200 * KIB))
        drip.data_received(POST % 9)
        fast.data_received(b"a" * 10 * KIB)
        drip_clock.advance(1.0)
        drip.data_received(b"a")
        connection(table)
        assert (fast_wire.is_closed, drip_wire.is_closed) == (False, True)

    asyncio.run(scenario())


def test_a_pipelined_drip_is_owed_nothing_once_the_request_before_it_is_answered() -> None:
    async def scenario() -> None:
        table = ConnectionTable(1)
        _, wire, protocol = connection(table)
        protocol.data_received(POST % 1 + b"a" + POST % 9 + b"a")
        assert list(table._waiting) == [], "the first request is owed an answer"
        await settle()
        assert wire.written.count(b"HTTP/1.1 200 ") == 1
        connection(table)
        assert wire.is_closed

    asyncio.run(scenario())


def test_an_answer_before_the_body_leaves_nothing_owed() -> None:
    async def scenario() -> None:
        async def refuse(_scope: object, _receive: object, send: object) -> None:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})  # type: ignore[operator]
            await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

        table = ConnectionTable(1)
        _, wire, protocol = connection(table)
        protocol.app = refuse  # type: ignore[assignment]
        protocol.data_received(POST % 2 + b"a")
        await settle()
        assert wire.written.startswith(b"HTTP/1.1 401 ")
        protocol.data_received(b"a")
        assert list(table._waiting) == [protocol]

    asyncio.run(scenario())
