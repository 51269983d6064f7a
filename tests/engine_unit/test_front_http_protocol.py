"""Limits on the size and time of requests: over sockets, and on the protocol class with a clock that the test sets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.front.http.connections import ConnectionRoom, ConnectionTable, connection_room
from rayloom_engine.front.http.protocol import HttpLimits
from rt_front import FrontUnderTest, running_front
from rt_protocol import connection, settle

ASK = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@contextlib.contextmanager
def connected(front: FrontUnderTest) -> Iterator[socket.socket]:
    host, port = front.api_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        yield connection


def answers(data: bytes) -> list[tuple[int, Any]]:
    """Status and document of each answer in `data`. Every answer must have a Content-Length."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(headers[b"content-length"])
        found.append((int(head.split(b" ")[1]), json.loads(data[:length])))
        data = data[length:]
    return found


def exchange(front: FrontUnderTest, data: bytes) -> list[tuple[int, Any]]:
    """All answers on a connection that sends only `data`, until the server ends the connection."""
    with connected(front) as connection:
        connection.sendall(data)
        return answers(b"".join(iter(lambda: connection.recv(65536), b"")))


def statuses(found: list[tuple[int, Any]]) -> list[tuple[int, str | None]]:
    return [(status, document.get("error", {}).get("code")) for status, document in found]


TOO_LARGE = [(431, "headers_too_large")]


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /version HTTP/1.1\r\nX-A: " + b"a" * 90_000, id="a value without an end"),
        pytest.param(b"GET /version HTTP/1.1\r\nX-" + b"a" * 90_000, id="a name without an end"),
        pytest.param(b"GET /" + b"a" * 90_000, id="an address without an end"),
        pytest.param(b"GET /version HTTP/1.1\r\n" + b"X-A: b\r\n" * 258, id="257 headers"),
        pytest.param(b"GET /version HTTP/1.1\r\n" + (b"X-A: " + b"a" * 8000 + b"\r\n") * 9, id="9 headers of 8 kB"),
    ],
)
def test_headers_beyond_the_bounds_are_refused_before_they_end(front: FrontUnderTest, head: bytes) -> None:
    found = exchange(front, head)
    assert statuses(found) == TOO_LARGE
    assert found[0][1]["error"]["message"].startswith("the request's headers are larger than 65536 bytes")


def test_headers_within_the_bounds_are_taken(front: FrontUnderTest) -> None:
    many = b"GET /version HTTP/1.1\r\nConnection: close\r\n" + b"X-A: b\r\n" * 255 + b"\r\n"
    large = b"GET /version HTTP/1.1\r\nConnection: close\r\nX-A: " + b"a" * 60_000 + b"\r\n\r\n"
    assert [status for head in (many, large) for status, _document in exchange(front, head)] == [200, 200]


@pytest.mark.parametrize("trailers", [b"X-A: " + b"a" * 90_000, b"X-A: b\r\n" * 300])
def test_trailers_count_as_headers(front: FrontUnderTest, trailers: bytes) -> None:
    assert (
        statuses(exchange(front, POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailers)) == TOO_LARGE
    )


def test_a_chunk_extension_without_an_end_is_refused(front: FrontUnderTest) -> None:
    assert statuses(exchange(front, POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 200_000)) == TOO_LARGE


def test_bytes_that_are_no_http_get_an_error_in_openais_format(front: FrontUnderTest) -> None:
    [(status, document)] = exchange(front, b"hello\r\n\r\n")
    assert status == 400
    assert document["error"]["message"] == "Invalid HTTP request received; send HTTP/1.1"


def test_5000_pipelined_requests_are_answered_in_order(front: FrontUnderTest) -> None:
    ask = b"GET /v1/models/%d HTTP/1.1\r\nHost: a\r\n\r\n"
    data = b"".join(ask % number for number in range(5000)) + ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    found = exchange(front, data)
    expected = [f'the model "{number}" does not exist; this server has "tiny"' for number in range(5000)]
    assert [document["error"]["message"] for _status, document in found[:-1]] == expected
    assert found[-1][0] == 200


def test_a_refusal_waits_for_the_answers_of_earlier_requests(front: FrontUnderTest) -> None:
    body = b'{"prompt": "Hi", "model": "tiny"}'
    ask = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with connected(front) as connection:
        connection.sendall(ask)
        front.wait_until(lambda: front.service.lifecycle.num_in_flight == 1, "the first request runs")
        connection.sendall(ASK + b"GET /version HTTP/1.1\r\n" + b"X-A: b\r\n" * 258 + b"\r\n")
        front.do(front.core.release)
        found = answers(b"".join(iter(lambda: connection.recv(65536), b"")))
    front.do(lambda: setattr(front.core, "hold_after", None))
    assert statuses(found) == [(200, None), (200, None), *TOO_LARGE]


def test_slow_clients_are_refused(tmp_path: Path) -> None:
    with running_front(tmp_path, limits=HttpLimits(head_s=0.2, body_s=0.2)) as front:
        assert exchange(front, b"") == []
        assert exchange(front, b"\r\n") == []
        [(status, document)] = exchange(front, b"GET /version HTTP/1.1\r\nHost: a\r\n")
        assert (status, document["error"]["code"]) == (408, "request_timeout")
        assert document["error"]["message"] == "the request's headers were not complete within 0.2 s; send it again"
        [(status, document)] = exchange(front, POST + b"Content-Length: 9\r\n\r\n{")
        assert (status, document["error"]["code"]) == (408, "request_timeout")
        assert document["error"]["message"] == (
            "the request's body was too slow: each part must come within 0.2 s, and all of it within 0.2 s and "
            "1 s for every 262144 bytes; send it again"
        )
        [(status, document)] = exchange(
            front, POST.replace(b"completions", b"messages") + b"Content-Length: 9\r\n\r\n{"
        )
        error = document["error"]  # in the form of Anthropic's API
        assert (status, document["type"], error["type"], error["code"]) == (
            408,
            "error",
            "invalid_request_error",
            "request_timeout",
        )
        [(status, _), (late, _)] = exchange(front, ASK + b"GET /version HTTP/1.1\r\n")
        assert (status, late) == (200, 408)
        assert front.service.lifecycle.num_in_flight == 0


def test_headers_have_10_s_however_they_drip() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        for second, data in enumerate((b"GET ", b"/ HTTP/1.1\r\n", b"A: b\r\n", b"C: ", b"d\r\n"), start=1):
            clock.advance(second)
            protocol.data_received(data)
        clock.advance(9.9)
        assert wire.written == b""
        clock.advance(10.0)
        assert wire.written.startswith(b"HTTP/1.1 408 ")
        clock.advance(11.0)
        assert wire.is_closed

    asyncio.run(scenario())


def test_after_a_body_the_connection_idles() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        clock.advance(9.0)
        protocol.data_received(POST + b"Content-Length: 3\r\n\r\n")
        clock.advance(38.0)
        protocol.data_received(b"aaa")
        await settle()
        assert wire.written.startswith(b"HTTP/1.1 200 ")
        protocol.data_received(b"GET / HTTP/1.1\r\n")  # an uncancelled timer of the body would fire too late
        clock.advance(47.9)
        assert b"408" not in wire.written
        clock.advance(48.0)
        assert b"HTTP/1.1 408 " in wire.written

    asyncio.run(scenario())


def test_a_loop_that_stood_still_takes_no_client_for_a_slow_one() -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        clock.stand_still(15.0)
        assert not wire.is_closed
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        await settle()
        assert wire.written.startswith(b"HTTP/1.1 200 ")
        clock.advance(17.0)
        assert not wire.is_closed

    asyncio.run(scenario())


GET = b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(b"", GET, id="a new connection"),
        pytest.param(GET, GET, id="the next request"),
        pytest.param(GET[:9], GET[9:], id="a part of the head"),
        pytest.param(GET + GET[:9], GET[9:], id="a part of the next head"),
        pytest.param(POST + b"Content-Length: 3\r\n\r\na", b"aa", id="a part of the body"),
    ],
)
def test_a_request_that_is_sent_while_a_drain_begins_is_answered_and_its_connection_ends(
    before: bytes, after: bytes
) -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        protocol.data_received(before)
        await settle()
        num_before = wire.written.count(b"HTTP/1.1 200 ")
        protocol.shutdown()
        clock.advance(0.09)
        assert not wire.is_closed
        protocol.data_received(after)
        await settle()
        assert wire.written.count(b"HTTP/1.1 200 ") == num_before + 1
        assert wire.written.count(b"connection: close") == 1
        assert wire.is_closed

    asyncio.run(scenario())


@pytest.mark.parametrize(("before", "seconds"), [(b"", 0.5), (GET, 0.1)])
def test_a_connection_without_a_request_ends_soon_after_a_drain_begins(before: bytes, seconds: float) -> None:
    async def scenario() -> None:
        clock, wire, protocol = connection()
        protocol.data_received(before)
        await settle()
        protocol.shutdown()
        clock.advance(seconds - 0.01)
        assert not wire.is_closed
        clock.advance(seconds)
        assert wire.is_closed

    asyncio.run(scenario())


class Peer:
    def __init__(self, name: str, evicted: list[str]) -> None:
        self.name = name
        self._evicted = evicted

    def evict(self) -> None:
        self._evicted.append(self.name)


def test_a_full_table_closes_the_connection_that_waited_longest() -> None:
    evicted: list[str] = []
    table = ConnectionTable(3)
    a, b, c, d, e, f = (Peer(name, evicted) for name in "abcdef")
    assert [table.opened(peer) for peer in (a, b, c)] == [True] * 3
    table.has_request(a)
    assert (table.opened(d), evicted) == (True, ["b"]), "a is owed an answer"
    table.closed(b)
    table.waits(a)
    table.has_request(d)
    assert (table.opened(e), evicted) == (True, ["b", "c"])
    assert (table.opened(f), evicted) == (True, ["b", "c", "a"])
    table.has_request(e)
    table.has_request(f)
    assert len(table) == 3


def test_a_table_of_busy_connections_refuses_but_not_at_the_admin_port() -> None:
    for refuses in (True, False):
        evicted: list[str] = []
        table = ConnectionTable(1, refuses=refuses)
        busy, late = Peer("busy", evicted), Peer("late", evicted)
        table.opened(busy)
        table.has_request(busy)
        assert table.opened(late) is not refuses
        assert (len(table), evicted) == (1 if refuses else 2, [])


@pytest.mark.parametrize(
    ("max_files", "room"),
    [
        (256, ConnectionRoom(96, 32)),  # 256 - 64 for the process - 64 for the admin port = 128 = 96 + 32
        (1024, ConnectionRoom(672, 224)),
        (1_000_000, ConnectionRoom(4096, 2048)),
    ],
)
def test_the_room_for_connections_follows_from_the_limit_of_open_files(max_files: int, room: ConnectionRoom) -> None:
    assert connection_room(max_files) == room
