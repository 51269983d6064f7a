"""A long prompt whose half layers take longer than hang_seconds is slow, not hung: it answers, unnoticed by others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from rt_server import RunningServer, running_server
from rt_tiny import slow_checkpoint

ARGUMENTS = ("--served-model-name", "m", "--hang-seconds", "1", "--heartbeat-seconds", "0.4", "--threads", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("slow")
    model = str(slow_checkpoint(folder / "model"))
    with running_server(folder, "--model", model, *ARGUMENTS, "--max-num-batched-tokens", "4096") as running:
        yield running


@pytest.mark.parametrize("num_tokens", [6_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_prompt_with_slow_half_layers_answers_and_others_see_no_recovery(
    server: RunningServer, num_tokens: int, measured: Callable[[str], None]
) -> None:
    def ask(prompt: list[int]) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.api_url}/v1/completions", json=body, timeout=600.0)

    def ask_in_turn() -> None:
        while long_answer.is_alive():
            others.append(ask([5, 6, 7]).status_code)

    answers: list[httpx.Response] = []
    others: list[int] = []
    long_answer = threading.Thread(target=lambda: answers.append(ask([5 + i % 90 for i in range(num_tokens)])))
    began = time.monotonic()
    long_answer.start()
    ask_in_turn()
    long_answer.join()
    seconds = time.monotonic() - began

    [answer] = answers
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == {**answer.json()["usage"], "prompt_tokens": num_tokens, "completion_tokens": 4}
    assert others and set(others) == {200}
    assert server.status()["recoveries"] == []
    measured(f"{num_tokens} tokens answered after {seconds:.1f} s, {len(others)} other requests meanwhile")
