"""Asking peers that keep no rule: a raw socket that says what a test gives it."""

import asyncio
import time

import pytest
import uvloop

from rayloom_operator.engines import request as status_request
from rayloom_operator.engines.request import ask
from rayloom_operator.errors import EngineUnavailable

HOST = "127.0.0.1"
HEADER = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def asked(parts, *, closes, pause_s=0.0):
    """What `ask` makes of a peer that answers so, in these parts."""

    async def run():
        done = asyncio.Event()

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part.encode())
                await writer.drain()
                await asyncio.sleep(pause_s)
            if not closes:
                await done.wait()
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                async with asyncio.timeout(10):
                    return await ask(HOST, port, "secret")
            finally:
                done.set()

    # The operator's own loop, whose transports are others than Python's.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    "parts",
    [
        [HEADER + "Content-Length: 2\r\n\r\n{}"],
        [HEADER + "content-length:2\r\n\r\n", "{", "}"],
        [HEADER + "Content-Len", "gth: 2\r\n\r", "\n{}"],
    ],
)
def test_an_answer_is_whole_when_its_length_is_there_though_the_peer_does_not_close(parts):
    assert asked(parts, closes=False, pause_s=0.01) == (200, b"{}")


@pytest.mark.parametrize(
    "parts",
    [
        [HEADER + "\r\n{}"],
        [HEADER + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
        [HEADER + "Content-Length: 2\r\ntransfer-encoding:chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
    ],
)
def test_an_answer_without_a_length_ends_with_the_connection(parts):
    assert asked(parts, closes=True) == (200, b"{}")


@pytest.mark.parametrize("line", ["HTTP/1.1 401 Unauthorized", "HTTP/1.0 302 Found", "HTTP/1.1 503 "])
@pytest.mark.parametrize("length", ["Content-Length: 2\r\n", ""])
def test_every_answer_has_its_code(line, length):
    assert asked([f"{line}\r\n{length}\r\n{{}}"], closes=True) == (int(line.split()[1]), b"{}")


@pytest.mark.parametrize("line", ["HTTP/1.1 2000 OK", "HTTP/1.1 OK", "SSH-2.0-OpenSSH", "HTTP/1.1 999999 "])
def test_what_has_no_code_is_a_failed_answer(line):
    with pytest.raises(EngineUnavailable):
        asked([f"{line}\r\nContent-Length: 2\r\n\r\n{{}}"], closes=True)


def test_a_length_in_the_body_is_none():
    body = "{\r\nContent-Length: 1\r\n\r\n}"
    assert asked([HEADER + "\r\n" + body[:-1], body[-1]], closes=True, pause_s=0.01) == (200, body.encode())


@pytest.mark.parametrize(
    "rest", [f"Content-Length: {'9' * 30}\r\n\r\n{{}}", f"Transfer-Encoding: chunked\r\n\r\n{'f' * 30}\r\n{{}}"]
)
def test_a_huge_length_is_a_failed_answer(rest):
    with pytest.raises(EngineUnavailable):
        asked([HEADER + rest], closes=True)


def test_a_part_of_an_answer_is_none_and_the_wait_for_the_rest_ends(monkeypatch):
    monkeypatch.setattr(status_request, "_TIMEOUT_S", 0.1)
    with pytest.raises(EngineUnavailable, match=r"no answer within 0\.1 s"):
        asked([HEADER + "Content-Length: 3\r\n\r\n{}"], closes=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [((), "GET /status"), (("POST", "/drain"), "POST /drain"), (("DELETE", "/drain"), "DELETE /drain")],
)
def test_what_is_asked_is_a_whole_request_with_the_token_and_no_body(arguments, line):
    async def run():
        heard = []

        async def answer(reader, writer):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"{HEADER}Content-Length: 2\r\n\r\n{{}}".encode())
            heard.append(await reader.read())  # what comes after it, until the operator ends the connection
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        async with server, asyncio.timeout(20):
            assert await ask(HOST, server.sockets[0].getsockname()[1], "secret", *arguments) == (200, b"{}")
            while len(heard) < 2:
                await asyncio.sleep(0.005)
        return heard

    request, rest = asyncio.run(run())
    first, *headers = request.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert first == f"{line} HTTP/1.1"
    assert {"Authorization: Bearer secret", "Content-Length: 0", "Connection: close"} <= set(headers)
    assert rest == b""


def test_an_answer_that_drips_costs_no_more_than_one_that_comes_at_once():
    """Each byte is looked at once: 250,000 pieces after a long header, or 60,000 that took minutes of CPU time."""

    class Answer:
        def __init__(self):
            self.value = None

        def done(self):
            return self.value is not None

        def set_result(self, value):
            self.value = value

    body = b"x" * 250_000
    head = b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 4000 + b"\r\nContent-Length: 250000\r\n\r\n"
    exchange = status_request._Exchange(b"", Answer())
    began = time.thread_time()
    for number in range(len(head)):
        exchange.data_received(head[number : number + 1])
    for number in range(len(body)):
        exchange.data_received(body[number : number + 1])
    assert time.thread_time() - began < 4.0
    assert exchange.answer.value == (200, body)


MINIMAL = HEADER + "Preference-Applied: return=minimal\r\n"


@pytest.mark.parametrize(
    ("header", "length", "most"),
    [(MINIMAL, 70_000, 65536), (MINIMAL.lower().replace("http", "HTTP"), 70_000, 65536), (HEADER, 270_000, 262144)],
)
@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("piece", [1000, 300_000])
def test_an_answer_that_is_too_long_is_a_failed_one(header, length, most, says_length, piece):
    parts = ["x" * min(piece, length - at) for at in range(0, length, piece)]
    said = f"Content-Length: {length}\r\n" if says_length else ""
    with pytest.raises(EngineUnavailable, match=f"more than {most} bytes"):
        asked([f"{header}{said}\r\n", *parts], closes=False)


def test_an_answer_that_ignores_the_preference_may_be_the_full_document():
    body = "x" * 200_000
    assert asked([f"{HEADER}Content-Length: 200000\r\n\r\n", body], closes=False) == (200, body.encode())


@pytest.mark.parametrize("length", [66_000, 300_000])
def test_headers_that_do_not_end_are_a_failed_answer(length):
    with pytest.raises(EngineUnavailable, match="more than 65536 bytes"):
        asked([HEADER + "X-Long: " + "x" * length + "\r\n\r\n"], closes=False)


def test_an_answer_in_hundreds_of_chunks_is_none():
    with pytest.raises(EngineUnavailable, match="chunks"):
        asked([HEADER + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\nx\r\n" * 257 + "0\r\n\r\n"], closes=True)
