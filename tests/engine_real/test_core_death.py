"""`kill -9` of the core while streams run: nothing fails, and no token differs from an undisturbed run.

The rules: retries off; new requests keep arriving; the fault lands when every stream has at least 16 and at most half
of its tokens; float32; a request has failed on any HTTP error, error event, missing [DONE], changed or missing token.
"""

from __future__ import annotations

import signal
import threading
import time

import pytest

from rt_server import RunningServer, running_server, wait_until
from rt_streams import NUM_TOKENS, completion_body, join_streams, start_streams


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024")
    with running_server(tmp_path_factory.mktemp("core-death"), *arguments) as running:
        yield running


def test_killing_the_core_costs_a_pause_and_no_request(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [completion_body(index) for index in range(8)]
    late_bodies = [completion_body(index, 16) for index in range(8, 14)]
    undisturbed, threads = start_streams(server, [*bodies, *late_bodies])
    join_streams(threads)
    assert [stream.failure for stream in undisturbed] == [None] * 14

    streams, threads = start_streams(server, bodies)
    wait_until(
        lambda: all(len(stream.tokens) >= 16 for stream in streams),
        60.0,
        lambda: f"tokens so far: {[len(s.tokens) for s in streams]}",
    )
    core = server.children()["core"]
    core.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    received = [len(stream.tokens) for stream in streams]
    assert max(received) <= NUM_TOKENS // 2, f"the fault came too late: {received}"
    late, late_threads = start_streams(server, late_bodies[:3])  # while the core is dead
    core.wait(10.0)
    later, later_threads = start_streams(server, late_bodies[3:])
    join_streams([*threads, *late_threads, *later_threads])

    got = [*streams, *late, *later]
    assert [stream.failure for stream in got] == [None] * 14
    assert [len(stream.tokens) for stream in got] == [NUM_TOKENS] * 8 + [16] * 6
    assert [stream.tokens for stream in got] == [stream.tokens for stream in undisturbed]
    assert [stream.text for stream in got] == [stream.text for stream in undisturbed]

    status = server.status()
    assert (status["state"], status["epoch"]) == ("serving", 2)
    assert status["recoveries"][-1]["process"] == "core"
    assert status["recoveries"][-1]["replayed_requests"] >= 8
    resumed = min(moment for stream in streams for moment in stream.times if moment > killed_at + 0.2)
    with capsys.disabled():
        print(
            f"\n  core killed with {received} tokens out of {NUM_TOKENS}; "
            f"tokens flow again after {resumed - killed_at:.2f} s; 0 of 14 requests failed"
        )


def test_n_choices_go_on_after_the_core_died(server: RunningServer) -> None:
    # Long enough that a status, which comes once a second, is sent while it runs, also on a fast machine.
    body = {**completion_body(1), "n": 3, "max_tokens": 150}
    request = body
    expected = server.client.post(f"{server.api_url}/v1/completions", json=request).json()
    answers: list[dict] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.client.post(f"{server.api_url}/v1/completions", json=request).json())
    )
    before = server.status()["step"]
    thread.start()
    wait_until(lambda: server.status()["requests"]["running"] == 3, 30.0, lambda: str(server.status()))
    assert server.status()["step"] >= before
    server.children()["core"].send_signal(signal.SIGKILL)
    thread.join(120.0)
    assert [choice["text"] for choice in answers[0]["choices"]] == [choice["text"] for choice in expected["choices"]]


def test_a_killed_front_is_back_within_seconds_and_the_core_lives(server: RunningServer) -> None:
    core = server.children()["core"].pid
    front = server.children()["front"]
    front.send_signal(signal.SIGKILL)
    front.wait(10.0)
    # The supervisor holds the socket, so this request waits for the new front instead of being refused.
    answer = server.client.post(f"{server.api_url}/v1/completions", json=completion_body(0, 4))
    deadline = time.monotonic() + 30.0
    while answer.status_code == 503 and time.monotonic() < deadline:
        answer = server.client.post(f"{server.api_url}/v1/completions", json=completion_body(0, 4))
    assert answer.status_code == 200, answer.text
    assert server.children()["core"].pid == core


def test_the_log_holds_no_error(server: RunningServer) -> None:
    lines = [line for line in server.log_text().splitlines() if " ERROR " in line or "Traceback" in line]
    assert lines == []
