"""Log lines that any peer can cause: at most one a second, or one for each problem."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from pathlib import Path

import pytest

from rayloom_engine.common.rare_lines import MAX_PROBLEMS, OncePerProblem, RareLines
from rayloom_engine.core_server.sockets import CoreIo, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.protocol.framing import frame, read_frame
from rayloom_engine.protocol.messages import Hello
from rt_front import running_front


def lines(filter: RareLines, *messages: str) -> list[str]:
    """The log lines that pass the filter."""
    records = [logging.LogRecord("n", logging.WARNING, "", 0, message, None, None) for message in messages]
    return [record.getMessage() for record in records if filter.filter(record)]


def test_a_line_a_second_has_the_number_of_those_held_back() -> None:
    now = [10.0]
    filter = RareLines(("bad", "worse"), clock=lambda: now[0])
    assert lines(filter, "bad", "bad", "worse", "other", "other", "bad") == ["bad", "worse", "other", "other"]
    now[0] = 10.9
    assert lines(filter, "bad") == []
    now[0] = 11.0
    assert lines(filter, "bad", "bad", "worse") == ["bad (3 more since the last such line)", "worse"]
    now[0] = 12.0
    assert lines(filter, "bad") == ["bad (1 more since the last such line)"]
    now[0] = 13.0
    assert lines(filter, "bad") == ["bad"]


def test_a_problem_is_new_once() -> None:
    problems = OncePerProblem()
    assert [problems.is_new(name) for name in ("a", "b", "a")] == [True, True, False]
    problems.solved()
    assert problems.is_new("a")
    for number in range(MAX_PROBLEMS):
        problems.is_new(str(number))
    assert problems.is_new("a"), "it was forgotten for newer ones"


def test_malformed_requests_do_not_fill_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.setattr(log, "disabled", False)
    requests = (
        b"hello\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
    )
    with caplog.at_level(logging.WARNING, logger="uvicorn.error"), running_front(tmp_path) as front:
        for rare in log.filters:
            assert isinstance(rare, RareLines)
            rare._clock = lambda: 5.0  # the clock stands still
        host, port = front.api_url.removeprefix("http://").split(":")
        for request in requests * 5:
            with socket.create_connection((host, int(port)), timeout=20.0) as connection:
                connection.sendall(request)
                assert connection.recv(65536).startswith(b"HTTP/1.1 ")
    said = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert len(said) == len(set(said)) == 3, said
    assert said[0] == "Invalid HTTP request received."


def test_a_front_that_is_refused_again_and_again_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def greet(hello: Hello) -> bool:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "core.sock"))
        writer.write(frame(hello))
        try:
            await read_frame(reader)
        except asyncio.IncompleteReadError:
            return False
        finally:
            writer.close()
        return True

    other = Hello(token="secret", front_id="f", version=99)
    stranger = Hello(token="wrong", front_id="f")
    welcome = Hello(token="secret", front_id="f")
    io = CoreIo(
        f"unix:{tmp_path}/core.sock",
        "secret",
        Inbox(deque(), threading.Event()),
        CoreState(epoch=7, executor="uni").status,
    )
    io.start()
    with caplog.at_level(logging.WARNING, logger="rayloom_engine.core_server.sockets"):
        given = (other, other, stranger, other, stranger, welcome, other)
        assert [asyncio.run(greet(hello)) for hello in given] == [False] * 5 + [True, False]
    io.stop()
    said = [record.getMessage().partition(";")[0].partition(",")[0] for record in caplog.records]
    version, token = "refused front f: it speaks protocol 99", "refused a connection without the right token"
    assert said == [version, token, version], "and again once a front was welcome"
