"""A front whose core dies, whose client disconnects, or that drains; also API keys and CORS origins."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.front.operations.service import Waits
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.messages import Outputs, Refused, SequenceOutput, Submit
from rayloom_engine.status import EngineStatus
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front, text_of

WAITS = Waits(ping_s=0.05, accept_s=0.05)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path, waits=WAITS) as running:
        yield running


def test_a_stream_continues_unchanged_when_the_core_dies(front: FrontUnderTest) -> None:
    text = "one \U0001f600 two, three"
    front.do(lambda: setattr(front.core, "script", say(text)))
    front.do(lambda: setattr(front.core, "hold_after", 6))  # in the middle of the emoji's four bytes
    with front.chat_stream(stream_options={"include_usage": True}, stop=["never"]) as stream:
        received = [next(stream)]
        while text_of(received) != "one ":
            received.append(next(stream))
        front.wait_until(lambda: sum(len(s.generated_ids) for s in sequences(front)) == 6, "6 tokens are here")
        front.do(front.core.die)
        front.do(front.core.release)
        received += list(stream)
    assert text_of(received) == text
    assert received[-1] == "[DONE]"
    assert received[-2]["usage"]["completion_tokens"] == len(text.encode()) + 1
    first, again = front.do(lambda: list(front.core.submits))
    assert not first.is_resume
    assert again.is_resume
    assert again.generated_ids == tuple(text.encode()[:6])
    for name in ("sequence_id", "prompt_ids", "params", "priority", "arrival"):
        assert getattr(first, name) == getattr(again, name)


def sequences(front: FrontUnderTest) -> list[Any]:
    """The client's unfinished sequences; call it in the front's loop."""
    return list(front.service.client.unfinished())


def test_unfinished_choices_are_resubmitted_in_order_and_finished_ones_are_not(front: FrontUnderTest) -> None:
    def script(submit):
        return say("short" if submit.sequence_id.endswith("-0") else "a longer text")(submit)

    front.do(lambda: setattr(front.core, "script", script))
    front.do(lambda: setattr(front.core, "hold_after", 8))
    with front.chat_stream(n=3) as stream:
        received = []
        while "stop" not in [choice["finish_reason"] for event in received for choice in event["choices"]]:
            received.append(next(stream))
        front.wait_until(lambda: [len(s.generated_ids) for s in sequences(front)] == [8, 8], "two wait with 8 tokens")
        front.do(front.core.die)
        front.do(front.core.release)
        received += list(stream)
    assert [text_of(received, index) for index in range(3)] == ["short", "a longer text", "a longer text"]
    submits = front.do(lambda: list(front.core.submits))
    assert [submit.sequence_id[-2:] for submit in submits] == ["-0", "-1", "-2", "-1", "-2"]
    assert submits[1].fork_of == submits[0].sequence_id
    assert [submit.fork_of for submit in submits[3:]] == [None, None]  # the new core does not know choice 0
    assert [submit.is_further_choice for submit in submits] == [False, True, True, True, True]


def test_each_core_hears_at_once_whether_the_engine_drains(front: FrontUnderTest) -> None:
    front.wait_until(lambda: front.core.drains[-1:] == [False], "a core may know of a drain that has ended")
    front.do(lambda: front.service.lifecycle.drain(True))
    front.wait_until(lambda: front.core.drains[-1:] == [True], "it hears of the drain")
    num_drains = front.do(lambda: len(front.core.drains))
    front.do(front.core.die)
    front.wait_until(lambda: front.core.drains[num_drains:] == [True], "the next core hears of it, too")
    front.do(lambda: front.service.lifecycle.drain(False))
    front.wait_until(lambda: front.core.drains[-1:] == [False], "it has ended")


def test_a_request_that_comes_while_the_core_is_away_waits_for_it(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(front.chat("Hi")))
    thread.start()
    front.wait_until(lambda: len(front.core.submits) == 1, "the core has it")
    front.do(front.core.reset)
    front.do(front.core.die)
    thread.join(60.0)
    assert answers[0].json()["choices"][0]["message"]["content"] == "Hello there."


def test_ready_stays_true_during_a_recovery_and_status_shows_it(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "state", "starting"))
    front.do(front.core.die)
    front.wait_until(lambda: len(front.core.hellos) == 2, "the front is back")
    front.wait_until(lambda: front.service.lifecycle.state[0] == "recovering", "it recovers")
    assert front.http.get("/ready").status_code == 200
    assert front.http.get("/health").json() == {"status": "ok", "state": "recovering"}
    status = EngineStatus.model_validate(front.admin.get("/status").json())
    assert (status.state, status.epoch) == ("recovering", 2)
    assert [(r.process, r.cause, r.seconds, r.phases) for r in status.recoveries] == [("core", "core_lost", None, [])]

    front.do(lambda: setattr(front.core, "state", "serving"))
    front.do(front.core.send_status)
    front.wait_until(lambda: front.service.lifecycle.state[0] == "serving", "it serves again")
    [recovery] = EngineStatus.model_validate(front.admin.get("/status").json()).recoveries
    assert recovery.seconds is not None
    assert [(phase.name, phase.seconds) for phase in recovery.phases] == [("load", 0.5)]
    metrics = front.http.get("/metrics").text
    assert 'rayloom:recoveries_total{cause="core_lost",model_name="tiny"} 1' in metrics
    # Each core counts from zero. There were 2 preemptions before the loss, and 2 after it.
    assert 'rayloom:num_preemptions_total{model_name="tiny"} 4' in metrics


def test_the_status_names_a_lost_rank_its_node_and_the_phases_of_its_return(front: FrontUnderTest) -> None:
    def say_lost(rank: int) -> None:
        front.core.state, front.core.lost, front.core.message = "recovering", f"rank {rank}", f"rank {rank}: killed"
        front.core.send_status()

    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        next(stream)
        front.do(lambda: say_lost(1))
        front.wait_until(lambda: "rank 1: killed (node there); at " in front.service.lifecycle.state[1], "it says so")
        front.do(lambda: say_lost(0))  # no token has come since, so it is the same recovery
        front.do(lambda: (setattr(front.core, "state", "serving"), front.core.send_status()))
        front.wait_until(lambda: front.service.client.recoveries.open is None, "it serves again")
        front.do(front.core.release)
        assert list(stream)[-1] == "[DONE]"
    [recovery] = EngineStatus.model_validate(front.admin.get("/status").json()).recoveries
    assert (recovery.process, recovery.node, recovery.cause) == ("rank 1", "there", "rank 1: killed")
    assert recovery.replayed_requests == 1
    assert [phase.name for phase in recovery.phases] == ["load"]
    metrics = front.http.get("/metrics").text
    assert 'rayloom:recoveries_total{cause="rank_lost",model_name="tiny"} 1' in metrics
    assert 'rayloom:recovery_seconds_count{model_name="tiny"} 1' in metrics


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
def test_a_client_that_leaves_frees_its_sequences_at_once(front: FrontUnderTest, stream: bool) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream, "n": 2}
    request = httpx.Request("POST", f"{front.api_url}/v1/chat/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    # The test uses a plain socket, because it cannot decide when an HTTP client closes its socket.
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        connection.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        front.wait_until(lambda: [len(s.generated_ids) for s in sequences(front)] == [3, 3], "both are under way")
    front.wait_until(lambda: len(front.core.aborts) == 2, "the core hears of it")
    front.wait_until(lambda: front.service.lifecycle.num_in_flight == 0, "nothing is in flight")
    assert front.do(lambda: sequences(front)) == []


def test_a_core_that_gives_up_ends_streams_with_an_error_event(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        received = [next(stream)]
        front.do(lambda: (setattr(front.core, "state", "failed"), setattr(front.core, "message", "no memory")))
        front.do(front.core.send_status)
        received += list(stream)
    assert received[-1]["error"]["code"] == "engine_unavailable"
    assert "no memory" in received[-1]["error"]["message"]
    assert "[DONE]" not in received
    refused = front.chat()
    assert refused.status_code == 503
    assert "no memory" in refused.json()["error"]["message"]
    assert front.admin.get("/status").json()["state"] == "failed"
    assert front.http.get("/health").json()["error"]["message"] == "the engine is failed: no memory"


def test_draining_finishes_running_requests_and_refuses_new_ones(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        received = [next(stream)]
        assert front.admin.post("/drain").json() == {"state": "draining", "in_flight": 1}
        refused = front.chat()
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "engine_draining"
        assert front.http.get("/ready").status_code == 503
        assert front.http.get("/health").status_code == 200
        front.do(front.core.release)
        received += list(stream)
    assert text_of(received) == "Hello there."
    assert front.admin.get("/status").json()["state"] == "draining"
    assert front.admin.delete("/drain").json() == {"state": "serving", "in_flight": 0}
    assert front.chat().status_code == 200


def test_before_the_first_load_requests_get_503_with_retry_after(tmp_path: Path) -> None:
    with running_front(tmp_path, ready=False) as front:
        front.wait_until(lambda: front.service.files is not None, "the tokenizer is read while the core loads")
        assert front.service.text is None
        refused = front.chat()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_starting"
        assert "load" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert front.http.get("/ready").status_code == 503
        for unhealthy in (front.http.get("/health"), front.admin.get("/health")):
            assert unhealthy.status_code == 503
            assert unhealthy.json()["error"]["code"] == "engine_starting"
        assert front.http.get("/v1/models").status_code == 200
        assert front.admin.get("/status").json()["state"] == "starting"
        front.do(lambda: setattr(front.core, "state", "serving"))
        front.do(front.core.send_status)
        front.wait_until(lambda: front.service.lifecycle.was_ready, "the front is ready")
        assert front.chat().status_code == 200


def test_the_fronts_own_count_fills_the_queue_while_the_core_is_away(tmp_path: Path) -> None:
    with running_front(tmp_path, waits=WAITS, max_queued_requests=1, max_num_seqs=1) as front:
        front.do(lambda: setattr(front.core, "is_silent", True))
        with front.chat_stream(), front.chat_stream():
            refused = front.chat()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"


def test_a_request_accepted_while_the_core_is_away_is_never_refused(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "state", "starting"))
    front.do(front.core.die)
    front.wait_until(lambda: len(front.core.hellos) == 2, "the front is back")
    front.wait_until(lambda: front.service.lifecycle.state[0] == "recovering", "it recovers")
    assert front.chat().status_code == 200
    assert [submit.is_resume for submit in front.do(lambda: list(front.core.submits))] == [True]


def test_a_refusal_that_comes_after_the_status_line_is_overcome(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))
    with front.chat_stream() as stream:  # the status line with 200 has arrived
        front.do(lambda: setattr(front.core, "is_silent", False))
        [submit] = front.do(lambda: list(front.core.submits))
        send_to_front(front, refusal_of(submit))
        received = list(stream)
    assert text_of(received) == "Hello there."
    assert received[-1] == "[DONE]"
    assert [submit.is_resume for submit in front.do(lambda: list(front.core.submits))] == [False, True]


def test_a_stream_of_which_one_choice_is_refused_at_once_is_429(tmp_path: Path) -> None:
    with running_front(tmp_path, waits=Waits(accept_s=20.0)) as front:
        front.do(lambda: setattr(front.core, "is_silent", True))
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(front.chat(n=2, stream=True)))
        thread.start()
        front.wait_until(lambda: len(front.core.submits) == 2, "the core has both")
        first, second = front.do(lambda: list(front.core.submits))
        output = SequenceOutput(sequence_id=first.sequence_id, token_ids=(65,))
        send_to_front(front, Outputs((output,)), refusal_of(second))
        thread.join(60.0)
        assert answers[0].status_code == 429
        assert front.do(lambda: sequences(front)) == []


def refusal_of(submit: Submit) -> Refused:
    return Refused(sequence_id=submit.sequence_id, reason="queue_full", message="no room")


def send_to_front(front: FrontUnderTest, *messages: Any) -> None:
    """Sends all messages in one write, so that they arrive together."""
    data = b"".join(map(frame, messages))
    front.do(lambda: [writer.write(data) for writer in front.core._writers])


def test_a_sequence_that_cannot_be_encoded_fails_alone(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))
    with front.chat_stream() as broken, front.chat_stream() as whole:
        front.do(lambda: setattr(sequences(front)[0], "priority", 10**30))
        front.do(front.core.reset)
        front.do(front.core.die)
        assert "cannot be handed to the engine" in list(broken)[-1]["error"]["message"]
        assert text_of(list(whole)) == "Hello there."


def test_api_keys_guard_every_path_that_uses_the_model(tmp_path: Path) -> None:
    with running_front(tmp_path, api_keys=("k1", "k2")) as front:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic k1"}):
            for path in ("/v1/models", "/tokenize", "/v1/chat/completions"):
                refused = front.http.request("GET" if "models" in path else "POST", path, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert "x-request-id" in refused.headers
        assert front.http.get("/v1/models", headers={"Authorization": "Bearer k2"}).status_code == 200
        assert front.http.get("/health").status_code == 200
        assert front.http.get("/metrics").status_code == 200


def test_the_admin_port_requires_its_token(tmp_path: Path) -> None:
    (tmp_path / "admin-token").write_text("t0k")
    with running_front(tmp_path, admin_token_file=str(tmp_path / "admin-token")) as front:
        assert front.admin.get("/status").status_code == 401
        assert front.admin.post("/drain").status_code == 401
        assert front.admin.get("/status", headers={"Authorization": "Bearer t0k"}).status_code == 200


def test_browsers_of_allowed_origins_may_call(tmp_path: Path) -> None:
    with running_front(tmp_path, api_keys=("k",), cors_allowed_origins=["https://a.example"]) as front:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        allowed = front.http.options("/v1/chat/completions", headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = front.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = front.http.options("/v1/chat/completions", headers={**ask, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_core_with_another_token_is_never_talked_to(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        link = front.service.client.pool.links["core"]
        front.do(lambda: setattr(link, "core", dataclasses.replace(link.core, token="x")))
        front.do(front.core.die)
        front.wait_until(lambda: front.core.num_refused_hellos >= 1, "a greeting was refused")
        assert not front.do(lambda: front.service.client.is_connected)
        assert front.do(lambda: len(front.core.hellos)) == 1


def test_status_follows_its_model_and_the_cores_numbers(front: FrontUnderTest) -> None:
    status = EngineStatus.model_validate(front.admin.get("/status").json())
    assert (status.state, status.reason, status.step) == ("serving", "", 4)
    assert status.kv_cache.usage == pytest.approx(0.3)
    assert status.model is not None
    assert (status.model.name, status.model.max_model_len) == ("tiny", 512)
    assert status.last_token_age_seconds is not None
    assert status.last_token_age_seconds >= 0.25
    assert [(phase.name, phase.finished) for phase in status.startup] == [("load", True)]
    assert status.api_url == front.api_url
