"""Streams whose tokens a callback writes: the bytes are those that ASGI sends. Slow clients get no tokens this way."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.generation.deltas import ChoiceDelta
from rayloom_engine.front.http.direct_body import DirectBody, _HeldTransport, direct_body, framed, offer
from rayloom_engine.front.http.protocol import BoundedProtocol
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate
from rayloom_engine.front.openai.chat.call import ChatCall
from rayloom_engine.front.openai.chat.endpoint import ChatAnswer
from rayloom_engine.front.operations.service import Waits
from rt_byte_model import END
from rt_fake_core import say
from rt_front import FrontUnderTest, running_front


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as running:
        yield running


@given(text=st.text(), name=st.text())
def test_a_filled_template_is_the_event_of_the_encoded_document(text: str, name: str) -> None:
    def document(shown: str) -> dict[str, Any]:
        return {"name": name, "delta": {"reasoning": shown, "reasoning_content": shown}, "n": None}

    assert ChunkTemplate(document).filled(text) == b"data: %b\n\n" % msgspec.json.encode(document(text))


def cycle(**changes: Any) -> SimpleNamespace:
    written: list[bytes] = []
    state = {"chunked_encoding": True, "disconnected": False, "response_complete": False, **changes}
    flow = SimpleNamespace(write_paused=state.pop("write_paused", False))
    transport = SimpleNamespace(
        write=written.append, close=lambda: written.append(b"closed"), is_closing=lambda: b"closed" in written
    )
    return SimpleNamespace(flow=flow, transport=transport, written=written, **state)


@pytest.mark.parametrize(
    ("changes", "is_open"),
    [
        ({}, True),
        ({"chunked_encoding": None}, False),  # the answer has not begun
        ({"chunked_encoding": False}, False),  # the answer has a Content-Length
        ({"write_paused": True}, False),
        ({"disconnected": True}, False),
        ({"response_complete": True}, False),
    ],
)
def test_a_body_is_open_while_an_answer_runs_and_its_client_reads(changes: dict[str, Any], is_open: bool) -> None:
    scope: dict[str, Any] = {}
    assert direct_body(scope) is None
    offer(scope, cast("RequestResponseCycle", cycle(**changes)))
    found = direct_body(scope)
    assert found is not None and found.is_open() is is_open


def test_a_part_is_a_chunk_of_the_body() -> None:
    answer = cycle()
    DirectBody(cast("RequestResponseCycle", answer)).write(framed(b"0123456789"))
    assert answer.written == [b"a\r\n0123456789\r\n"]
    assert framed(b"x" * 5000) == b"1388\r\n" + b"x" * 5000 + b"\r\n"


def test_what_a_cycle_writes_is_held_back_until_it_is_released_or_closed() -> None:
    answer = cycle()
    transport = answer.transport
    body = DirectBody(cast("RequestResponseCycle", answer))
    body.hold()
    answer.transport.write(b"head ")
    answer.transport.write(b"first")
    assert answer.written == []
    body.release()
    assert (answer.written, answer.transport) == ([b"head first"], transport)
    body.release()
    body.hold()
    answer.transport.write(b"last")
    assert not answer.transport.is_closing()
    answer.transport.close()
    assert answer.written == [b"head first", b"last", b"closed"]
    assert answer.transport is transport


def test_what_is_held_back_for_a_client_that_has_gone_is_dropped() -> None:
    answer = cycle()
    body = DirectBody(cast("RequestResponseCycle", answer))
    body.hold()
    answer.transport.write(b"head")
    answer.disconnected = True
    body.release()
    assert answer.written == []


def test_the_head_of_a_stream_leaves_in_one_write_with_its_first_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[bytes] = []
    release = _HeldTransport.release

    def record(held: _HeldTransport) -> None:
        parts.append(b"".join(held._held))
        release(held)

    monkeypatch.setattr(_HeldTransport, "release", record)
    with running_front(tmp_path, waits=Waits(accept_s=60.0)) as front:  # a busy machine may take a second for a token
        front.do(lambda: setattr(front.core, "script", say("ab")))
        with front.chat_stream(max_tokens=50) as events:
            assert list(events)
    (part,) = parts
    assert part.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\n\r\n" in part and b'"role":"assistant"' in part


def test_a_stream_that_fails_at_its_first_event_is_answered_before_a_pipelined_request_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is written at once when the stream ends, so the stream's head must not be held back until then."""

    def broken(_answer: ChatAnswer, _delta: ChoiceDelta) -> list[Any]:
        raise ZeroDivisionError("the first event")

    monkeypatch.setattr(ChatAnswer, "chunks", broken)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    fields = b"Host: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with running_front(tmp_path, waits=Waits(accept_s=60.0)) as front:
        place = urlsplit(front.api_url)
        front.do(lambda: setattr(front.core, "hold_after", 0))
        with socket.create_connection((place.hostname, place.port), timeout=60.0) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + fields + body)
            front.wait_until(lambda: front.service.lifecycle.num_in_flight == 1, "the stream runs")
            client.sendall(b"GET /version HTTP/1.1\r\n" + b"X-A: b\r\n" * 258 + b"\r\n")
            (protocol,) = front.do(lambda: [each for each in _protocols() if each.client == client.getsockname()])
            front.wait_until(lambda: protocol._refusal is not None, "the second request is refused")
            front.do(front.core.release)
            received = b"".join(iter(lambda: client.recv(65536), b""))
        front.wait_until(lambda: front.service.lifecycle.num_in_flight == 0, "the stream has ended")
    stream, refusal = received.split(b"HTTP/1.1 ")[1:]
    assert stream.startswith(b"200 ") and b"internal error" in stream and stream.endswith(b"\r\n0\r\n\r\n")
    assert refusal.startswith(b"431 ")


def test_without_an_event_the_head_of_a_stream_leaves_alone_after_the_seconds_for_it(tmp_path: Path) -> None:
    with running_front(tmp_path, waits=Waits(ping_s=3600.0, accept_s=0.02)) as front:
        front.do(lambda: setattr(front.core, "hold_after", 0))
        body = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 5}
        with front.http.stream("POST", "/v1/completions", json=body, timeout=10.0) as response:
            assert response.status_code == 200  # the head has arrived, and no token is computed yet
            assert [each.generated_ids for each in front.do(lambda: list(front.service.client.unfinished()))] == [[]]
            front.do(front.core.release)
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_the_reader_of_a_chat_is_made_after_the_engine_got_the_request(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the engine computes meanwhile, and the first event does not wait for the reader."""
    unfinished: list[int] = []
    reader = ChatCall.reader

    def record(call: ChatCall, request_id: str, choice: int) -> ChoiceReader:
        unfinished.append(len(list(front.service.client.unfinished())))
        return reader(call, request_id, choice)

    monkeypatch.setattr(ChatCall, "reader", record)
    front.do(lambda: setattr(front.core, "script", say("ab")))
    with front.chat_stream(max_tokens=50) as events:
        assert list(events)
    assert unfinished == [1]


def test_each_token_of_a_stream_is_an_event_of_the_documented_form(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say('He said "é€😀".')))
    with front.chat_stream(max_tokens=50) as events:
        shown = list(events)
    assert shown.pop() == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in shown) == 'He said "é€😀".'
    assert {tuple(event) for event in shown} == {("id", "object", "created", "model", "system_fingerprint", "choices")}
    assert {tuple(event["choices"][0]) for event in shown[:-1]} == {("index", "delta", "logprobs", "finish_reason")}
    assert [event["choices"][0]["finish_reason"] for event in shown] == [None] * (len(shown) - 1) + ["stop"]


def test_a_client_that_does_not_read_gets_all_its_text_later_and_fills_no_memory(tmp_path: Path) -> None:
    """Tokens wait in the mailbox, where each needs only some bytes. The connection's buffer would hold whole events.

    The events of the test are large, because the system's buffers hold megabytes.
    """
    name = "m" * 4000
    with running_front(tmp_path, max_model_len=10_000, served_model_name=name) as front:
        _check_client_that_does_not_read(front, name)


def _check_client_that_does_not_read(front: FrontUnderTest, name: str) -> None:
    num_tokens = 4000
    front.do(lambda: setattr(front.core, "script", lambda _submit: [*b"x" * (num_tokens - 1), END]))
    front.do(lambda: setattr(front.core, "tokens_per_output", 1))
    num_before = front.do(lambda: len(front.core.submits))
    place = urlsplit(front.api_url)
    body = json.dumps({"model": name, "prompt": "a", "stream": True, "max_tokens": num_tokens}).encode()
    fields = ("Host: h", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields, "", ""))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60.0)
    with client:
        client.connect((place.hostname, place.port))
        client.sendall(head.encode() + body)
        front.wait_until(lambda: len(front.core.submits) == num_before + 1, "the request came", 60.0)
        front.wait_until(lambda: not list(front.service.client.unfinished()), "the core sent all tokens", 60.0)
        connections = front.do(lambda: [each for each in _transports() if each.get_write_buffer_size()])
        assert connections
        assert all(each.get_write_buffer_size() < 200_000 for each in connections)
        received = bytearray()
        while part := client.recv(1 << 20):
            received += part
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    shown = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)
    assert (len(shown), shown.strip("x")) == (num_tokens - 1, "")
    assert len(events) < num_tokens / 2  # waiting tokens were sent together


def _protocols() -> list[BoundedProtocol]:
    return [each for each in gc.get_objects() if type(each) is BoundedProtocol]


def _transports() -> list[Any]:
    kinds = ("_SelectorSocketTransport", "TCPTransport")  # of asyncio and of uvloop
    return [each for each in gc.get_objects() if type(each).__name__ in kinds and not each.is_closing()]
