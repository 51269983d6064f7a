"""A long prompt whose half layers take longer than hang_seconds counts as slow, not hung, and is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rt_server import running_server
from rt_tiny import slow_checkpoint

ARGUMENTS = ("--served-model-name", "m", "--hang-seconds", "1", "--heartbeat-seconds", "0.4", "--threads", "1")
LAYOUTS = {"one rank": (), "two ranks": ("--executor", "mp", "--tensor-parallel-size", "2")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(slow_checkpoint(tmp_path_factory.mktemp("slow")))


@pytest.mark.parametrize(
    ("layout", "num_tokens"),
    [
        ("one rank", 4_500),
        ("two ranks", 4_500),
        pytest.param("one rank", 20_000, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_with_slow_half_layers_answers_and_others_see_no_recovery(
    model: str, tmp_path: Path, layout: str, num_tokens: int, measured: Callable[[str], None]
) -> None:
    def ask(prompt: list[int]) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{server.api_url}/v1/completions", json=body, timeout=600.0)

    answers: list[httpx.Response] = []
    others: list[int] = []
    long_prompt = [5 + index % 90 for index in range(num_tokens)]
    arguments = (*ARGUMENTS, *LAYOUTS[layout], "--max-num-batched-tokens", "4096")
    with running_server(tmp_path, "--model", model, *arguments) as server:
        thread = threading.Thread(target=lambda: answers.append(ask(long_prompt)))
        began = time.monotonic()
        thread.start()
        while thread.is_alive():
            others.append(ask([5, 6, 7]).status_code)
        seconds = time.monotonic() - began
        recoveries = server.status()["recoveries"]

    [answer] = answers
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 4)
    assert others and set(others) == {200}
    assert recoveries == []
    measured(f"{layout}, {num_tokens} tokens: {seconds:.1f} s, {len(others)} other requests meanwhile")
