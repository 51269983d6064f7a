"""The front as a process of its own: signals and drain. The core is a fake in the test's process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.front.operations.service import Waits
from rayloom_engine.text.tokenizer import Tokenizer
from rt_forks import forking_context
from rt_front import MODEL, running_front, text_of
from rt_front_process import front_process, start, wait_until
from rt_readable import is_readable


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signal.SIGTERM)
            wait_until(front.is_refusing, "the front drains")
            assert httpx.delete(f"{front.admin_url}/drain").status_code == 409
            assert front.is_refusing()
            front.do(front.core.release)
            received += list(stream)
        assert text_of(received) == "Hello there."
        assert received[-1] == "[DONE]"
        assert front.process.wait(30.0) == 0


def with_gateways(folder: Path) -> dict[str, Any]:
    """Settings of an engine that accepts gateways, with more time for a drain than any test waits."""
    return {"front_port": 0, "front_key_file": str(folder / "key"), "drain_seconds": 200.0}


def test_sigterm_lets_sequences_of_gateways_finish(tmp_path: Path) -> None:
    with front_process(tmp_path, **with_gateways(tmp_path)) as front:
        front.process.send_signal(signal.SIGTERM)
        wait_until(lambda: front.do(lambda: front.core.drains[-1:] == [True]), "gateways hear of the drain")
        for _ in range(20):  # the core sends a status before each answer
            front.do(front.core.send_status)
            status = httpx.get(f"{front.admin_url}/status").json()
            assert (status["state"], status["requests"]["in_flight"]) == ("draining", 0)
            assert status["requests"]["running"] == 1, "a gateway's"
        front.do(lambda: setattr(front.core, "num_running", 0))
        assert front.process.wait(60.0) == 0


@pytest.mark.parametrize("loss", ["the time of the drain is over", "the core has died", "the core has failed"])
def test_a_drain_does_not_wait_for_sequences_that_no_core_computes(tmp_path: Path, loss: str) -> None:
    is_over = loss == "the time of the drain is over"
    settings = with_gateways(tmp_path) | ({"drain_seconds": 0.5} if is_over else {})
    with front_process(tmp_path, **settings) as front:
        front.process.send_signal(signal.SIGTERM)
        wait_until(lambda: front.do(lambda: front.core.drains[-1:] == [True]), "the front drains")
        if loss == "the core has died":
            front.do(lambda: setattr(front.core, "num_running", 0))  # the next core has no sequences
            front.do(front.core.die)
        elif not is_over:
            front.do(lambda: setattr(front.core, "state", "failed"))
        assert front.process.wait(60.0) == 0


@pytest.mark.parametrize("how", ["SIGTERM", "POST /drain"])
def test_a_drain_ends_kept_connections_so_that_clients_go_elsewhere(tmp_path: Path, how: str) -> None:
    with front_process(tmp_path) as front:
        idle, busy = (http.client.HTTPConnection(front.url.removeprefix("http://"), timeout=20.0) for _ in range(2))
        for kept in (idle, busy):
            kept.request("GET", "/ready")
            assert kept.getresponse().read()
        body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hi"}}], "stream": true}}'
        busy.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        stream = busy.getresponse()
        assert stream.readline().startswith(b"data: ")
        if how == "SIGTERM":
            front.process.send_signal(signal.SIGTERM)
        else:
            assert httpx.post(f"{front.admin_url}/drain").status_code == 200
        assert idle.sock.recv(1) == b"", "the idle one ended, with no answer to a question that nobody asked"
        assert httpx.get(f"{front.url}/version").headers["connection"] == "close"
        front.do(front.core.release)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert busy.sock.recv(1) == b"", "the busy one ended after its answer"


def test_a_refusal_in_a_drain_waits_for_the_body_so_that_no_client_loses_it(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        assert httpx.post(f"{front.admin_url}/drain").status_code == 200
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30.0) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n{")
            assert not is_readable(connection, 0.3), "no answer, and no end, before the body is there"
            connection.sendall(b'"a"')
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"engine_draining" in answer


def test_a_drain_that_is_taken_back_keeps_connections_again(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        assert httpx.post(f"{front.admin_url}/drain").status_code == 200
        assert httpx.get(f"{front.url}/version").headers["connection"] == "close"
        assert httpx.delete(f"{front.admin_url}/drain").status_code == 200
        assert "connection" not in httpx.get(f"{front.url}/version").headers


def test_a_stream_that_does_not_finish_in_time_gets_an_error_event(tmp_path: Path) -> None:
    with front_process(tmp_path, drain_seconds=0.1) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signal.SIGTERM)
            received += list(stream)
        assert "stopped" in received[-1]["error"]["message"]
        assert front.process.wait(30.0) == 0


def test_a_repeated_drain_keeps_its_age_and_a_new_drain_does_not(tmp_path: Path) -> None:
    mark = tmp_path / "draining"
    with front_process(tmp_path) as front:

        def asked_at(method: str) -> int:
            assert httpx.request(method, f"{front.admin_url}/drain").json() == {"state": "draining", "in_flight": 0}
            return mark.stat().st_mtime_ns

        first = asked_at("POST")
        assert asked_at("POST") == first
        assert httpx.delete(f"{front.admin_url}/drain").json() == {"state": "serving", "in_flight": 0}
        assert asked_at("POST") > first


def test_a_requested_drain_ends_nothing_and_a_stop_after_it_gives_no_second_term(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drain_s = 1.0
    with front_process(tmp_path, drain_seconds=drain_s) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            assert httpx.post(f"{front.admin_url}/drain").json() == {"state": "draining", "in_flight": 1}
            asked_at = time.monotonic()
            wait_until(lambda: time.monotonic() > asked_at + drain_s, "its time is over")
            status = httpx.get(f"{front.admin_url}/status").json()
            assert (status["state"], status["requests"]["in_flight"]) == ("draining", 1)
            front.process.send_signal(signal.SIGTERM)
            received += list(stream)
        assert received[-1]["error"]["message"] == "the engine was stopped before this request was finished"
        assert front.process.wait(30.0) == 0
    assert "draining: 1 requests in flight, 0 connections that read kept answers, at most 0 s" in capfd.readouterr().err


def test_a_drained_front_lives_and_answers_until_its_stop_signal(tmp_path: Path) -> None:
    with front_process(tmp_path, drain_seconds=0.01) as front:
        assert httpx.post(f"{front.admin_url}/drain").json() == {"state": "draining", "in_flight": 0}
        for _ in range(20):
            status = httpx.get(f"{front.admin_url}/status").json()
            assert (status["state"], status["requests"]["in_flight"]) == ("draining", 0)
        assert front.process.poll() is None
        front.process.send_signal(signal.SIGTERM)
        assert front.process.wait(30.0) == 0


def test_a_request_that_does_not_finish_in_time_gets_an_error_with_a_status(tmp_path: Path) -> None:
    with front_process(tmp_path, drain_seconds=0.1) as front:
        answers: list[httpx.Response] = []
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        url = f"{front.url}/v1/chat/completions"
        client = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=60.0)))
        client.start()
        wait_until(lambda: front.do(lambda: len(front.core.submits) == 1), "the request runs")
        front.process.send_signal(signal.SIGTERM)
        client.join(60.0)
        assert answers[0].status_code == 503
        error = answers[0].json()["error"]
        assert (error["code"], error["message"]) == (
            "engine_unavailable",
            "the engine was stopped before this request was finished",
        )
        assert front.process.wait(30.0) == 0


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["SIGINT", "SIGTERM twice"]
)
def test_a_hard_stop_does_not_wait(tmp_path: Path, signals: list[signal.Signals]) -> None:
    with front_process(tmp_path) as front:
        with front.chat_stream() as stream:
            received = [next(stream)]
            front.process.send_signal(signals[0])
            for number in signals[1:]:
                wait_until(front.is_refusing, "the first signal was taken")
                front.process.send_signal(number)
            received += list(stream)
        assert "stopped" in received[-1]["error"]["message"]
        assert front.process.wait(30.0) == 0


def test_a_bad_key_file_ends_the_process_with_the_code_for_bad_settings(tmp_path: Path) -> None:
    process, _url, _admin_url = start(tmp_path, f"unix:{tmp_path}/core.sock", api_key_file=str(tmp_path / "none"))
    assert process.wait(60.0) == EXIT_CONFIG


def test_a_variable_without_keys_ends_the_process_with_the_code_for_bad_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_API_KEYS", " , ")
    process, _url, _admin_url = start(tmp_path, f"unix:{tmp_path}/core.sock")
    assert process.wait(60.0) == EXIT_CONFIG


def test_keys_in_the_file_change_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with front_process(tmp_path, api_key_file=str(file)) as front:

        def status(key: str) -> int:
            return httpx.get(f"{front.url}/v1/models", headers={"X-Api-Key": key}).status_code

        assert (status("old"), status("new")) == (200, 401)
        file.write_text("new\nnewer\n")
        wait_until(lambda: status("new") == 200, "the new key is taken")
        assert status("old") == 401
        assert 'rayloom:api_keys{model_name="tiny"} 2' in httpx.get(f"{front.url}/metrics").text
        file.write_text("\n")
        bad = 'rayloom:api_key_file_unusable{model_name="tiny"} 1'
        wait_until(lambda: bad in httpx.get(f"{front.url}/metrics").text, "the empty file is noticed")
        assert status("new") == 200


def test_idle_connections_beyond_the_limit_make_room_for_new_ones(tmp_path: Path) -> None:
    """256 files allow 96 connections; the process and the admin port need the other files."""
    with front_process(tmp_path, max_files=256) as front, contextlib.ExitStack() as stack:
        stream = stack.enter_context(front.chat_stream())
        received = [next(stream)]
        host, port = front.url.removeprefix("http://").split(":")
        idle = []
        for _ in range(300):
            idle.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=30.0)))
            if len(idle) % 20 == 0:
                assert httpx.get(f"{front.url}/health").status_code == 200
                assert httpx.get(f"{front.admin_url}/status").status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b"", "the one that had waited longest was closed"
        idle[-1].sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 200", "the last one is still there"
        front.do(front.core.release)
        received += list(stream)
        assert text_of(received) == "Hello there.", "a connection that is owed an answer is none of them"


def test_a_client_that_is_still_sending_gets_its_refusal_whole(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30.0) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\n" + b"X-A: b\r\n" * 100_000)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_a_requested_drain_survives_the_front(tmp_path: Path) -> None:
    with front_process(tmp_path) as front:
        assert httpx.post(f"{front.admin_url}/drain", headers={"Origin": "https://a.example"}).status_code == 403
        assert httpx.post(f"{front.admin_url}/drain").status_code == 200
        front.process.kill()
        front.process.wait(60.0)
        process, _url, admin_url = start(tmp_path, f"unix:{tmp_path}/core.sock")
        try:
            assert httpx.get(f"{admin_url}/status", timeout=120.0).json()["state"] == "draining"
            httpx.delete(f"{admin_url}/drain")
            assert not (tmp_path / "draining").exists()
        finally:
            process.kill()
            process.wait(60.0)


@pytest.mark.parametrize("was_ready", [True, False], ids=["after the first load", "before it"])
def test_a_restarted_front_is_healthy_where_the_model_had_been_loaded(tmp_path: Path, was_ready: bool) -> None:
    if was_ready:
        with front_process(tmp_path) as front:
            assert httpx.get(f"{front.url}/health").status_code == 200
    process, url, _admin_url = start(tmp_path, f"unix:{tmp_path}/no-core.sock")
    try:
        assert httpx.get(f"{url}/ready", timeout=120.0).status_code == 503
        assert httpx.get(f"{url}/health").status_code == (200 if was_ready else 503)
    finally:
        process.kill()
        process.wait(60.0)


def test_requests_wait_for_a_restarted_front(tmp_path: Path) -> None:
    with running_front(tmp_path, ready=False, start=2, server_started=time.time() - 1000) as front:
        status = front.admin.get("/status").json()
        assert status["state"] == "recovering"
        assert status["uptime_seconds"] >= 1000
        loss = status["recoveries"][0]
        assert (loss["process"], loss["cause"], loss["seconds"]) == ("front", "front_lost", None)
        answers: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answers.append(front.chat()))
        client.start()
        front.wait_until(lambda: front.service.lifecycle.num_held == 1, "the request waits")
        front.do(lambda: setattr(front.core, "state", "serving"))
        front.do(front.core.send_status)
        client.join(60.0)
        assert answers[0].status_code == 200
        loss = front.admin.get("/status").json()["recoveries"][0]
        assert loss["seconds"] > 0
        assert loss["replayed_requests"] == 0


def test_a_restarted_front_waits_only_so_long(tmp_path: Path) -> None:
    with running_front(tmp_path, ready=False, start=2, waits=Waits(ready_s=0.05)) as front:
        assert front.chat().status_code == 503


def test_a_tokenizer_that_fails_in_any_way_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_folder: Path) -> Tokenizer:
        raise KeyError("odd")

    monkeypatch.setattr(Tokenizer, "load", load)
    with running_front(tmp_path, ready=False) as front:
        front.wait_until(lambda: front.service.state()[0] == "failed", "the failure shows")
        assert "KeyError: 'odd'" in front.admin.get("/status").json()["reason"]


def test_a_lost_core_runs_nothing(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        front.do(lambda: setattr(front.service.client, "_address", f"unix:{tmp_path}/none"))
        assert front.admin.get("/status").json()["requests"]["running"] == 1
        front.do(front.core.die)
        front.wait_until(lambda: not front.service.client.is_connected, "the connection is gone")
        status = front.admin.get("/status").json()
        assert (status["ranks"], status["requests"]["running"]) == ([], 0)


def seen_by_a_fork(folder: Path) -> str:
    """The variable RAYLOOM_MARK as a new fork sees it.

    These fronts are forks of the same process.
    """
    seen = folder / "seen"
    command = f'printf %s "${{RAYLOOM_MARK-unset}}" > {seen}'
    process = forking_context().Process(target=os.execlp, args=("sh", "sh", "-c", command))
    process.start()
    process.join(60.0)
    assert process.exitcode == 0
    return seen.read_text()


def test_each_fork_has_the_environment_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLOOM_MARK", "first")
    assert seen_by_a_fork(tmp_path) == "first"
    monkeypatch.setenv("RAYLOOM_MARK", "second")
    assert seen_by_a_fork(tmp_path) == "second"
    monkeypatch.delenv("RAYLOOM_MARK")
    assert seen_by_a_fork(tmp_path) == "unset"
