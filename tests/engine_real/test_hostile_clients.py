"""Requests that blocked earlier fronts or filled their memory. Now other clients still get answers in time.

All tests share one real server, and limit the growth of the server's memory. Each request is as large as the request
that did harm. test_front_http_protocol.py and test_front_body.py test whether single requests are refused, and how long
this takes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rt_canary import Canary, canary
from rt_faults import patched_server
from rt_server import RunningServer, wait_until

HEALTH_S = 0.2  # the longest time for which other clients may wait for an answer
MIB = 2**20
BODY_BYTES = 8 * MIB - 1024

# If the flag file exists, a request to /version blocks the front's event loop for ever and deletes the file.
_LOOP_STANDS_STILL = """
import os, time

def patch(answer):
    async def engine_version(request):
        if os.path.exists({flag!r}):
            os.unlink({flag!r})
            time.sleep(3600)
        return await answer(request)

    answer.__globals__["engine_version"] = engine_version
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hostile")
    code = _LOOP_STANDS_STILL.format(flag=str(folder / "flag"))
    arguments = ("--max-model-len", "1024", "--served-model-name", "m", "--hang-seconds", "5")
    with patched_server(
        folder, code, *arguments, target=("rayloom_engine.front.operations.health", "engine_version")
    ) as running:
        yield running


@contextlib.contextmanager
def watched(server: RunningServer, most_mib: float) -> Iterator[Canary]:
    """Checks that /health answers in time during the block, and that the front's memory grows by at most `most_mib`."""
    front = server.children()["front"]
    with canary(server.api_url, front) as found:
        yield found
    assert server.children()["front"].pid == front.pid, "the front died"
    assert "Traceback" not in server.log_text()
    assert found.worst_s < HEALTH_S
    assert found.growth_mib < most_mib


def connect(server: RunningServer) -> socket.socket:
    host, port = server.api_url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60.0)


def pour(server: RunningServer, head: bytes, part: bytes, num_bytes: int) -> bytes:
    """Sends `head`, then `part` repeatedly, until the server ends the connection. Returns the server's answer."""
    with connect(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(head)
            for _ in range(num_bytes // len(part)):
                connection.sendall(part)
        with contextlib.suppress(OSError):
            return connection.recv(65536)
    return b""  # the connection was reset


def post(server: RunningServer, path: str, body: bytes) -> tuple[int, str]:
    """Status and error message of a request with a JSON body."""
    host, port = server.api_url.removeprefix("http://").split(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=120.0)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
    return answer.status, document.get("error", {}).get("message", "")


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Returns the results of `calls`, each of which runs in its own thread."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180.0)
    return results


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"GET /health HTTP/1.1\r\n", b"X-A: b\r\n" * 8192),
        (b"GET /health HTTP/1.1\r\nX-A: ", b"a" * 65536),
        (
            b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n",
            b"X-A: b\r\n" * 8192,
        ),
    ],
    ids=["headers without an end", "a header of 150 MB", "trailers without an end"],
)
def test_headers_without_an_end(server: RunningServer, head: bytes, part: bytes) -> None:
    with watched(server, most_mib=32) as found:
        answers = at_once([lambda: pour(server, head, part, 150 * 10**6)] * 3)
    for answer in answers:
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert len(found.delays_s) >= 10


def test_many_stop_strings_for_many_choices(server: RunningServer) -> None:
    stops = [f"{number:04}{'a' * 1020}" for number in range(64)]
    body = {"model": "m", "prompt": ["a"] * 8, "n": 128, "stop": stops, "max_tokens": 1}
    with watched(server, most_mib=32):
        status, message = post(server, "/v1/completions", json.dumps(body).encode())
        assert (status, message.partition(",")[0]) == (400, "the stop strings have 65536 characters together")


def test_as_many_choices_and_stop_strings_as_are_allowed(server: RunningServer) -> None:
    stops = [f"{number:04}{'a' * 60}" for number in range(64)]
    body = json.dumps({"model": "m", "prompt": ["a"] * 8, "n": 128, "stop": stops, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with watched(server, most_mib=64):
        with connect(server) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: server.status()["requests"]["in_flight"] == 1, 60.0, lambda: "it was not accepted")
        wait_until(lambda: server.status()["requests"]["in_flight"] == 0, 60.0, lambda: "its client is gone")


def test_connections_that_send_nothing_or_half(server: RunningServer) -> None:
    halves = (
        b"",
        b"GET /health HTTP/1.1\r\nX-A: ",
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n\r\n{",
    )
    with watched(server, most_mib=64), contextlib.ExitStack() as connections:
        for number in range(300):
            connection = connections.enter_context(connect(server))
            connection.sendall(halves[number % 3])
        assert server.status()["state"] == "serving"


def many(part: bytes, head: bytes = b'{"model":"m","prompt":[', tail: bytes = b"]}") -> bytes:
    return head + b",".join([part] * (BODY_BYTES // (len(part) + 1))) + tail


MESSAGE = b'{"messages":[{"role":"user","content":"'
# Bodies are made only when they are sent, because all of them together are 100 MiB.
BODIES: dict[str, Callable[[], bytes]] = {
    "text": lambda: MESSAGE + b"a b " * (BODY_BYTES // 4) + b'"}]}',
    "escapes": lambda: MESSAGE + rb"\n" * (BODY_BYTES // 2) + b'"}]}',
    "brackets in a text": lambda: MESSAGE + b"[{," * (BODY_BYTES // 3) + b'"}]}',
    "numbers": lambda: many(b"1"),
    "floats": lambda: many(b"1.5"),
    "lists": lambda: many(b"[]"),
    "deep lists": lambda: many(b"[[[[[[[[]]]]]]]]"),
    "objects": lambda: many(b"{}"),
    "strings": lambda: many(b'""'),
    "messages": lambda: many(b'{"role":"user","content":"a"}', b'{"messages":[', b"]}"),
    "fields": lambda: b'{"model":"m",' + b",".join(b'"k%d":1' % number for number in range(BODY_BYTES // 12)) + b"}",
    "biases": lambda: many(b'"1":1', b'{"messages":[],"logit_bias":{', b"}}"),
    "brackets": lambda: b"[" * BODY_BYTES,
    "a number": lambda: b'{"seed":' + b"9" * BODY_BYTES + b"}",
    # These bodies have the largest allowed size of their kind.
    "a million ids": lambda: b'{"model":"m","prompt":[' + b",".join([b"1"] * 2**20) + b"]}",
    "the most strings": lambda: b'{"model":"m","prompt":[' + b",".join([b'"abc"'] * 65000) + b"]}",
    "the most lists": lambda: b'{"model":"m","prompt":[' + b",".join([b"[1]"] * 65000) + b"]}",
    "the most messages": lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 16000) + b"]}",
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_of_8_mib(server: RunningServer, kind: str) -> None:
    body = BODIES[kind]()
    path = "/v1/chat/completions" if b'"messages"' in body[:100] else "/v1/completions"
    with watched(server, most_mib=160):
        for _ in range(2):
            status, message = post(server, path, body)
            assert (status, message != "") == (400, True), message


def test_a_million_ids_to_turn_into_text(server: RunningServer) -> None:
    with watched(server, most_mib=300):
        assert post(server, "/detokenize", b'{"tokens":[' + b",".join([b"9"] * 2**20) + b"]}") == (200, "")


def test_large_bodies_at_the_same_time(server: RunningServer) -> None:
    body = BODIES["text"]()
    with watched(server, most_mib=300):
        calls = [lambda: post(server, "/v1/chat/completions", body)] * 8
        assert [status for status, _message in at_once(calls)] == [400] * 8


def test_a_front_whose_loop_stands_still_is_replaced(server: RunningServer, tmp_path: Path) -> None:
    """The last test here, because the server has a new front afterwards."""
    front = server.children()["front"]
    (server.log.parent / "flag").touch()
    with connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(1) == b"", "the front was killed before it answered"
    assert psutil.wait_procs([front], timeout=60.0)[1] == []
    wait_until(lambda: server.client.get(f"{server.api_url}/ready").status_code == 200, 60.0, server.log_text)
    assert "front shows no sign of life for 5 s and is killed" in server.log_text()
    assert [recovery["process"] for recovery in server.status()["recoveries"]] == ["front"]
