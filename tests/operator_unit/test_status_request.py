"""Requests to peers that break the rules of HTTP: a raw socket answers with the bytes of each test."""

import asyncio
import gc
import time

import pytest
import uvloop

from rayloom_operator.engines import request as status_request
from rayloom_operator.engines.request import ask
from rayloom_operator.errors import EngineUnavailable

HOST = "127.0.0.1"
HEADER = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def asked(parts, *, closes, pause_s=0.0):
    """The result of `ask` for a peer that writes these parts one by one."""

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
                async with asyncio.timeout(60):
                    return await ask(HOST, port, "secret")
            finally:
                done.set()

    # The operator runs on uvloop, whose transports differ from asyncio's.
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
def test_a_response_with_a_length_ends_there_if_the_peer_does_not_close(parts):
    assert asked(parts, closes=False, pause_s=0.01) == (200, b"{}")


@pytest.mark.parametrize(
    "parts",
    [
        [HEADER + "\r\n{}"],
        [HEADER + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
        [HEADER + "Content-Length: 2\r\ntransfer-encoding:chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
    ],
)
def test_a_response_without_a_length_ends_with_the_connection(parts):
    assert asked(parts, closes=True) == (200, b"{}")


@pytest.mark.parametrize("line", ["HTTP/1.1 401 Unauthorized", "HTTP/1.0 302 Found", "HTTP/1.1 503 "])
@pytest.mark.parametrize("length", ["Content-Length: 2\r\n", ""])
def test_each_response_has_its_status_code(line, length):
    assert asked([f"{line}\r\n{length}\r\n{{}}"], closes=True) == (int(line.split()[1]), b"{}")


@pytest.mark.parametrize("line", ["HTTP/1.1 2000 OK", "HTTP/1.1 OK", "SSH-2.0-OpenSSH", "HTTP/1.1 999999 "])
def test_a_response_without_a_status_code_fails(line):
    with pytest.raises(EngineUnavailable):
        asked([f"{line}\r\nContent-Length: 2\r\n\r\n{{}}"], closes=True)


def test_a_length_in_the_body_is_ignored():
    body = "{\r\nContent-Length: 1\r\n\r\n}"
    assert asked([HEADER + "\r\n" + body[:-1], body[-1]], closes=True, pause_s=0.01) == (200, body.encode())


@pytest.mark.parametrize(
    "rest", [f"Content-Length: {'9' * 30}\r\n\r\n{{}}", f"Transfer-Encoding: chunked\r\n\r\n{'f' * 30}\r\n{{}}"]
)
def test_a_response_with_a_huge_length_fails(rest):
    with pytest.raises(EngineUnavailable):
        asked([HEADER + rest], closes=True)


def test_a_response_that_stays_incomplete_fails_after_the_timeout(monkeypatch):
    monkeypatch.setattr(status_request, "_TIMEOUT_S", 0.1)
    with pytest.raises(EngineUnavailable, match=r"no answer within 0\.1 s"):
        asked([HEADER + "Content-Length: 3\r\n\r\n{}"], closes=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [((), "GET /status"), (("POST", "/drain"), "POST /drain"), (("DELETE", "/drain"), "DELETE /drain")],
)
def test_the_request_is_complete_with_the_token_and_without_a_body(arguments, line):
    async def run():
        received = []

        async def answer(reader, writer):
            received.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"{HEADER}Content-Length: 2\r\n\r\n{{}}".encode())
            received.append(
                await reader.read()
            )  # all bytes after the request, until the operator closes the connection
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        async with server, asyncio.timeout(20):
            assert await ask(HOST, server.sockets[0].getsockname()[1], "secret", *arguments) == (200, b"{}")
            while len(received) < 2:
                await asyncio.sleep(0.005)
        return received

    request, rest = asyncio.run(run())
    first, *headers = request.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert first == f"{line} HTTP/1.1"
    assert {"Authorization: Bearer secret", "Content-Length: 0", "Connection: close"} <= set(headers)
    assert rest == b""


def test_a_response_in_single_bytes_is_read_in_linear_time():
    """Each byte is searched once. With repeated searches, 60,000 pieces took minutes; now 250,000 take seconds."""

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


def test_a_request_without_a_response_leaves_no_cycle_of_objects():
    async def run():
        async def close(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(close, HOST, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            for _ in range(20):
                try:
                    await ask(HOST, port, "secret")
                except EngineUnavailable:
                    continue
                raise AssertionError("the peer sends no response")
            return gc.collect()

    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(run()) < 20  # fewer than one object for each request
    finally:
        gc.enable()


MINIMAL = HEADER + "Preference-Applied: return=minimal\r\n"


@pytest.mark.parametrize(
    ("header", "length", "max_bytes"),
    [(MINIMAL, 70_000, 65536), (MINIMAL.lower().replace("http", "HTTP"), 70_000, 65536), (HEADER, 270_000, 262144)],
)
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("piece", [1000, 300_000])
def test_a_response_that_is_too_long_fails(header, length, max_bytes, has_length, piece):
    parts = ["x" * min(piece, length - at) for at in range(0, length, piece)]
    length_header = f"Content-Length: {length}\r\n" if has_length else ""
    with pytest.raises(EngineUnavailable, match=f"more than {max_bytes} bytes"):
        asked([f"{header}{length_header}\r\n", *parts], closes=False)


def test_a_response_that_ignores_the_preference_may_be_the_full_document():
    body = "x" * 200_000
    assert asked([f"{HEADER}Content-Length: 200000\r\n\r\n", body], closes=False) == (200, body.encode())


@pytest.mark.parametrize("length", [66_000, 300_000])
def test_headers_without_an_end_fail(length):
    with pytest.raises(EngineUnavailable, match="more than 65536 bytes"):
        asked([HEADER + "X-Long: " + "x" * length + "\r\n\r\n"], closes=False)


def test_a_response_in_hundreds_of_chunks_fails():
    with pytest.raises(EngineUnavailable, match="chunks"):
        asked([HEADER + "Transfer-Encoding: chunked\r\n\r\n" + "1\r\nx\r\n" * 257 + "0\r\n\r\n"], closes=True)
