"""Requests in /status: numbers of finished and failed requests, and times of first tokens."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.front.operations.service import Waits
from rayloom_engine.protocol.gateway_requests import GatewayRequests
from rt_front import MODEL, FrontUnderTest, running_front


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path, waits=Waits(ping_s=0.05, accept_s=0.05)) as running:
        yield running


def counts(front: FrontUnderTest) -> tuple[int, int, int]:
    """Numbers of finished requests, failed requests and first tokens, once no request is in flight."""
    front.wait_until(lambda: front.service.lifecycle.num_in_flight == 0, "nothing is in flight")
    requests = front.admin.get("/status").json()["requests"]
    return requests["finished"], requests["failed"], requests["first_token_seconds"]["+Inf"]


def test_a_minimal_status_has_only_the_fields_that_the_operator_reads(front: FrontUnderTest) -> None:
    full = front.admin.get("/status")
    answer = front.admin.get("/status", headers={"Prefer": "return=minimal"})
    whole, minimal = full.json(), answer.json()

    # By this header the operator chooses its limit on the answer's size.
    assert answer.headers["Preference-Applied"] == "return=minimal"
    assert "Preference-Applied" not in full.headers

    assert whole.keys() - minimal.keys() == {"recoveries", "speculation"}
    assert minimal["ranks"] == [{"node": rank["node"]} for rank in whole["ranks"]]
    assert minimal["state"] == whole["state"] == "serving"


def test_nothing_is_counted_before_the_first_request(front: FrontUnderTest) -> None:
    requests = front.admin.get("/status").json()["requests"]
    assert (requests["finished"], requests["failed"]) == (0, 0)
    assert set(requests["first_token_seconds"].values()) == {0}


def test_a_successful_request_of_any_kind_is_counted_once(front: FrontUnderTest) -> None:
    assert front.chat().status_code == 200
    assert counts(front) == (1, 0, 1)
    with front.chat_stream(n=3) as stream:
        assert list(stream)[-1] == "[DONE]"
    assert counts(front) == (2, 0, 2)
    assert front.complete(["a", "b"]).status_code == 200
    assert counts(front) == (3, 0, 3)
    text = front.http.get("/metrics").text
    assert 'rayloom:requests_finished_total{model_name="tiny"} 3' in text
    assert 'rayloom:requests_failed_total{model_name="tiny"} 0' in text


def test_first_tokens_are_counted_up_to_each_time(front: FrontUnderTest) -> None:
    for seconds in (0.0005, 0.3, 0.5, 1000.0):
        front.do(lambda seconds=seconds: front.service.metrics.request_first_token_s.observe(seconds))
    first = front.admin.get("/status").json()["requests"]["first_token_seconds"]
    assert [first[edge] for edge in ("0.001", "0.25", "0.5", "160", "+Inf")] == [1, 1, 3, 3, 4]
    assert [*first] == sorted(first, key=float)


def test_an_engine_that_fails_a_request_before_its_answer_began_has_failed_it(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("poison", "the engine died of it")))
    assert front.chat().status_code == 500
    assert counts(front) == (1, 1, 0)


def test_a_fault_of_the_front_itself_is_a_failure(front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_request: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rayloom_engine.front.operations.service.Service.model_text", fail)
    assert front.chat().status_code == 500
    assert counts(front) == (1, 1, 0)


def test_an_error_event_is_a_failure(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        received = [next(stream)]
        front.do(lambda: front.core.refuse(front.core.submits[-1].sequence_id, "poison", "the engine died of it"))
        received += list(stream)
    assert received[-1]["error"]["code"] == "poisonous_request"
    assert counts(front) == (1, 1, 1)


def test_a_failed_engine_fails_running_and_new_requests(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        next(stream)
        front.do(lambda: (setattr(front.core, "state", "failed"), front.core.send_status()))
        assert list(stream)[-1]["error"]["code"] == "engine_unavailable"
    assert front.chat().status_code == 503
    assert counts(front) == (2, 2, 1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
def test_a_refused_request_is_not_counted(front: FrontUnderTest, stream: bool) -> None:
    assert front.chat(stream=stream, temperature=-1).status_code == 400
    assert (
        front.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}).status_code
        == 400
    )
    assert front.http.get("/v1/completions").status_code == 405
    for refusal, code in (("queue_full", 429), ("too_long", 400)):
        front.do(lambda refusal=refusal: setattr(front.core, "refusal", (refusal, "no")))
        assert front.chat(stream=stream).status_code == code
    assert front.admin.post("/drain").status_code == 200
    assert front.chat(stream=stream).status_code == 503
    assert counts(front) == (0, 0, 0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
def test_a_request_whose_client_disconnects_is_not_counted(front: FrontUnderTest, stream: bool) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    body: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "stream": stream}
    content = json.dumps(body).encode()
    host, port = front.api_url.removeprefix("http://").split(":")
    # The test uses a plain socket, because it cannot decide when an HTTP client closes its socket.
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        connection.sendall(head.encode() + content)
        front.wait_until(lambda: front.service.metrics.generation_tokens.value() == 3, "it is under way")
    assert counts(front) == (0, 0, 1)


def test_requests_that_gateways_send_to_the_core_are_added_once(front: FrontUnderTest) -> None:
    assert front.chat().status_code == 200
    first_tokens = (0, 2, *[0] * 18, 1)  # two within 5 ms, one after more than 160 s
    found = GatewayRequests(num_finished=4, num_failed=1, first_token_counts=first_tokens, first_token_s=200.0)
    for _ in range(2):
        front.do(lambda: (setattr(front.core, "gateway_requests", found), front.core.send_status()))
    front.wait_until(lambda: front.service.metrics.failed.value() == 1, "the status has come")
    assert counts(front) == (5, 1, 4)
    text = front.http.get("/metrics").text
    assert 'rayloom:requests_finished_total{model_name="tiny"} 5' in text
    assert 'rayloom:requests_failed_total{model_name="tiny"} 1' in text
    assert 'rayloom:time_to_first_token_seconds_count{model_name="tiny"} 4' in text


def test_the_core_learns_that_an_answer_is_complete_at_a_stop_string(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 8))
    assert front.complete("Hi", stop="lo t").json()["choices"][0]["text"] == "Hel"
    front.wait_until(lambda: len(front.core.completed) == 1, "the core hears of it")
    assert front.do(lambda: front.core.completed == front.core.aborts)
