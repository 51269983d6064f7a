"""Faults of a server whose core is also its only rank. If the core is killed, stopped or stuck, no request fails.

rt_streams.py has the rules for failed requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rayloom_engine.kv.host_file import remove_stale_files
from rt_faults import aim, breakable_server, outlive_supervisor, slow_steps, strike
from rt_message_events import read_messages_stream
from rt_raw_client import RawClient, streamed_text
from rt_response_events import read_responses_stream
from rt_server import RunningServer, files_with_copies, wait_until
from rt_streams import NUM_TOKENS, Said, completion_body, disturb, loaded_blocks
from rt_torch_users import users_of_torch

SLOW = pytest.mark.slow
ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--max-model-len", "1024", "--num-kv-blocks", "512")
COPIES = ("--kv-host-memory-bytes", str(8 << 20))


@pytest.fixture(scope="module")
def server(three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ("--model", three_layers, *ARGUMENTS, *COPIES, "--hang-seconds", "3", "--restart-budget", "20")
    with breakable_server(tmp_path_factory.mktemp("core-death"), *arguments) as running:
        files = files_with_copies(running)
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 2
        yield running
    # The last test kills the supervisor, so the next engine on the machine removes the files.
    remove_stale_files()
    assert not any(file.exists() for file in files)


@pytest.fixture(scope="module")
def expected(said_by_one_rank: Callable[[int], list[Said]]) -> list[Said]:
    return said_by_one_rank(NUM_TOKENS)


def test_no_process_imports_torch_in_float32(server: RunningServer) -> None:
    assert server.status()["model"]["compute_dtype"] == "float32"
    assert users_of_torch(server) == []


@pytest.mark.parametrize(
    "fault", ["killed", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("stopped", "stuck"))]
)
def test_a_fault_of_the_core_costs_a_pause_and_no_request(
    server: RunningServer, expected: list[Said], fault: str, measured: Callable[[str], None]
) -> None:
    children = server.children()
    num_loads = loaded_blocks(server)

    victim = "rank 0" if fault == "stuck" else "core"
    seen = disturb(server, expected, aim(server, victim, fault))
    assert seen.failures == []
    assert seen.after["recoveries"][-1]["process"] == "core"
    assert seen.after["recoveries"][-1]["replayed_requests"] >= len(expected)
    assert seen.after["ranks"][0]["weight_bytes_read"] > 0
    assert server.children()["front"].pid == children["front"].pid
    assert loaded_blocks(server) > num_loads, "the new core computed everything again"
    sentence = {
        "killed": "core died",
        "stopped": "core shows no sign of life for 3 s",
        "stuck": "the main thread stands still for",  # 3.5 s, because pulses are sent twice a second
    }
    assert sentence[fault] in server.log_text()
    measured(f"core {fault}: tokens flow again after {seen.seconds:.2f} s; 0 of {seen.num_requests} requests failed")


def test_answers_of_every_kind_continue_after_the_core_died_and_a_vanished_client_gets_its_own(
    server: RunningServer,
) -> None:
    """Clients read three answers: a chat with three choices, a response and a message. No client reads the fourth."""
    kept = {**completion_body(1), "max_tokens": NUM_TOKENS, "stream": True}
    asks = (_three_choices, _items_of_responses, _blocks_of_messages)
    with ThreadPoolExecutor() as pool:
        undisturbed_kept = pool.submit(httpx.post, f"{server.api_url}/v1/completions", json=kept, timeout=120.0)
        undisturbed = [pool.submit(ask, server, threading.Event()) for ask in asks]
        expected = [streamed_text(undisturbed_kept.result().text), *(answer.result() for answer in undisturbed)]

    key = {"Idempotency-Key": "order-66"}
    kill = aim(server, "core", "killed")
    have_begun = [threading.Event() for _ in asks]
    with ThreadPoolExecutor() as pool:
        with slow_steps(server.log.parent):
            client = RawClient(server.api_url, "/v1/completions", kept, key)
            client.read_until(b"data: ")
            client.vanish()
            answers = [pool.submit(ask, server, begun) for ask, begun in zip(asks, have_begun, strict=True)]
            for begun in have_begun:
                assert begun.wait(60.0), str(server.status())
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


SAMPLING = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "stream": True}
QUESTION = [{"role": "user", "content": "Tell me a long story."}]


def _streamed(server: RunningServer, path: str, body: dict[str, object], sign: bytes, begun: threading.Event) -> bytes:
    """All events of an answer. Sets `begun` when an event contains `sign`: the core is then computing the answer."""
    received = b""
    with httpx.stream("POST", f"{server.api_url}{path}", json={**body, **SAMPLING}, timeout=120.0) as answer:
        for part in answer.iter_bytes():
            if sign in received[-len(sign) :] + part:
                begun.set()
            received += part
    return received


def _three_choices(server: RunningServer, begun: threading.Event) -> list[str]:
    body = {**completion_body(1), "n": 3, "max_tokens": NUM_TOKENS}
    lines = _streamed(server, "/v1/completions", body, b'"text"', begun).decode().splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    texts = ["", "", ""]
    for line in lines:
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
    return texts


def _items_of_responses(server: RunningServer, begun: threading.Event) -> list[tuple[str, str]]:
    body = {"input": QUESTION, "max_output_tokens": NUM_TOKENS}
    events = _streamed(server, "/v1/responses", body, b'"delta"', begun)
    return [(item.kind, item.text) for item in read_responses_stream(_answer(events)).items]


def _blocks_of_messages(server: RunningServer, begun: threading.Event) -> list[dict[str, Any]]:
    body = {"messages": QUESTION, "max_tokens": NUM_TOKENS}
    events = _streamed(server, "/v1/messages", body, b'"delta"', begun)
    return read_messages_stream(_answer(events)).message["content"]


def _answer(events: bytes) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream; charset=utf-8"}, content=events)


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=SLOW)])
def test_a_front_that_is_gone_is_back_and_the_core_lives(server: RunningServer, fault: str) -> None:
    core = server.children()["core"].pid
    front = server.children()["front"]
    strike(server, "front", fault)
    front.wait(60.0)
    # The supervisor keeps the listening socket open. So this request is not refused, but waits for the new front.
    answer = server.client.post(f"{server.api_url}/v1/completions", json=completion_body(0, 4))
    assert answer.status_code == 200, answer.text
    assert server.children()["core"].pid == core


def test_the_log_holds_no_trace(server: RunningServer) -> None:
    assert "Traceback" not in server.log_text()


def test_nothing_outlives_a_killed_supervisor(server: RunningServer) -> None:
    """The last test here, because it ends the server."""
    assert outlive_supervisor(server) == []
