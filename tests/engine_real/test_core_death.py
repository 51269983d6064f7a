"""Faults of a server of one rank, which is the core. If it is killed, stopped or stuck, no request fails.

The rules are those of rt_streams.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rt_faults import aim, breakable_server, outlive_supervisor, strike
from rt_message_events import read_messages_stream
from rt_raw_client import RawClient, streamed_text
from rt_response_events import read_responses_stream
from rt_server import RunningServer, wait_until
from rt_streams import Said, completion_body, disturb, undisturbed

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024", "--hang-seconds", "3")
    with breakable_server(tmp_path_factory.mktemp("core-death"), *arguments, "--restart-budget", "20") as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[Said]:
    return undisturbed(server)


@pytest.mark.parametrize(
    "fault", ["killed", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("stopped", "stuck"))]
)
def test_a_fault_of_the_core_costs_a_pause_and_no_request(
    server: RunningServer, expected: list[Said], fault: str, measured: Callable[[str], None]
) -> None:
    children = server.children()

    victim = "rank 0" if fault == "stuck" else "core"
    seen = disturb(server, expected, aim(server, victim, fault))
    assert seen.failures == []
    assert seen.after["recoveries"][-1]["process"] == "core"
    assert seen.after["recoveries"][-1]["replayed_requests"] >= len(expected)
    assert seen.after["ranks"][0]["weight_bytes_read"] > 0
    assert server.children()["front"].pid == children["front"].pid
    sentence = {
        "killed": "core died",
        "stopped": "core shows no sign of life for 3 s",
        "stuck": "the main thread stands still for",  # 3.5 s: its pulses come twice a second
    }
    assert sentence[fault] in server.log_text()
    measured(f"core {fault}: tokens flow again after {seen.seconds:.2f} s; 0 of {seen.num_requests} requests failed")


def test_answers_of_every_kind_continue_after_the_core_died_and_a_vanished_client_gets_its_own(
    server: RunningServer,
) -> None:
    """Three choices, Responses and Messages are read while the core dies, and nobody reads the fourth answer."""
    kept = {**completion_body(1), "max_tokens": 200, "stream": True}
    with ThreadPoolExecutor() as pool:
        undisturbed_kept = pool.submit(_post, server, "/v1/completions", kept)
        undisturbed = [pool.submit(ask, server) for ask in (_three_choices, _items_of_responses, _blocks_of_messages)]
        expected = [streamed_text(undisturbed_kept.result().text), *(answer.result() for answer in undisturbed)]

    key = {"Idempotency-Key": "order-66"}
    client = RawClient(server.api_url, "/v1/completions", kept, key)
    client.read_until(b"data: ")
    client.vanish()
    kill = aim(server, "core", "killed")
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, server) for ask in (_three_choices, _items_of_responses, _blocks_of_messages)]
        wait_until(lambda: server.status()["requests"]["running"] == 6, 60.0, lambda: str(server.status()))
        struck_at = time.time()
        kill()
        wait_until(lambda: server.status()["state"] == "recovering", 60.0, lambda: str(server.status()))
        repeat = server.client.post(f"{server.api_url}/v1/completions", json=kept, headers=key, timeout=120.0)
        found = [streamed_text(repeat.text), *(answer.result(120.0) for answer in answers)]
    assert repeat.headers["idempotent-replayed"] == "true"
    assert found == expected
    recovery = server.status()["recoveries"][-1]
    assert recovery["at"] >= struck_at
    assert recovery["replayed_requests"] == 4, "some had ended before the core did"


def _post(server: RunningServer, path: str, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{server.api_url}{path}", json=body, timeout=120.0)


def _three_choices(server: RunningServer) -> list[str]:
    # Long enough that a status, which comes once a second, is sent while it runs, also on a fast machine.
    answer = _post(server, "/v1/completions", {**completion_body(1), "n": 3, "max_tokens": 100})
    return [choice["text"] for choice in answer.json()["choices"]]


SAMPLING = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True}
QUESTION = [{"role": "user", "content": "Tell me a long story."}]


def _items_of_responses(server: RunningServer) -> list[tuple[str, str]]:
    answer = _post(server, "/v1/responses", {"input": QUESTION, "max_output_tokens": 100, **SAMPLING})
    return [(item.kind, item.text) for item in read_responses_stream(answer).items]


def _blocks_of_messages(server: RunningServer) -> list[dict[str, Any]]:
    answer = _post(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 100, **SAMPLING})
    return read_messages_stream(answer).message["content"]


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=SLOW)])
def test_a_front_that_is_gone_is_back_and_the_core_lives(server: RunningServer, fault: str) -> None:
    core = server.children()["core"].pid
    front = server.children()["front"]
    strike(server, "front", fault)
    front.wait(60.0)
    # The supervisor holds the socket, so this request waits for the new front instead of being refused.
    answer = server.client.post(f"{server.api_url}/v1/completions", json=completion_body(0, 4))
    assert answer.status_code == 200, answer.text
    assert server.children()["core"].pid == core


def test_the_log_holds_no_trace(server: RunningServer) -> None:
    assert "Traceback" not in server.log_text()


def test_nothing_outlives_a_killed_supervisor(server: RunningServer) -> None:
    """The last one here: it ends the server."""
    assert outlive_supervisor(server) == []
