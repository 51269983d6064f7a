"""If a request crashes every process that computes it, only this request fails, with its reason. Others lose no token.

A plug-in of this test makes requests poisonous. If a prompt has a certain token, the process of the rank that samples
ends or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rt_faults import patched_server
from rt_server import RunningServer, wait_until
from rt_streams import completion_body, join_streams, start_streams
from rt_tiny import tiny_checkpoint, tiny_tokenizer

POISON = 250
NUM_STREAMS = 8
PLUG_IN = f"""
import os, time

def patch(runner):
    run = runner.run

    def run_or_die(self, plan):
        if self.answers and any({POISON} in new.token_ids[: new.num_prompt_tokens] for new in plan.new_slots):
            {{how}}
        return run(self, plan)

    runner.run = run_or_die
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer(folder)
    return tiny_checkpoint(folder)


@pytest.fixture(
    params=[
        "uni dies",
        "mp dies",
        pytest.param("uni hangs", marks=pytest.mark.slow),
        pytest.param("mp hangs", marks=pytest.mark.slow),
        pytest.param("uni spins", marks=pytest.mark.slow),
    ]
)
def server(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[RunningServer]:
    arguments = ["--model", str(checkpoint), "--dtype", "float32", "--served-model-name", "m"]
    executor, _, ending = request.param.partition(" ")
    how = {"dies": "os._exit(1)", "hangs": "time.sleep(1000)", "spins": "while True: pass"}[ending]
    # A spinning thread counts as hung after 6 x hang_seconds of CPU time, and in a trial after 24 x hang_seconds.
    hang_seconds = "1" if ending == "spins" else "3"
    if executor == "mp":
        arguments += ["--executor", "mp", "--pipeline-parallel-size", "2"]
    with patched_server(
        tmp_path, PLUG_IN.format(how=how), *arguments, "--hang-seconds", hang_seconds, "--restart-budget", "2"
    ) as running:
        yield running


def test_a_poisonous_request_fails_alone_and_with_its_reason(
    server: RunningServer, measured: Callable[[str], None]
) -> None:
    bodies = [completion_body(index) for index in range(NUM_STREAMS)]
    undisturbed, threads = start_streams(server, bodies)
    join_streams(threads)

    streams, threads = start_streams(server, bodies)
    wait_until(lambda: all(len(stream.tokens) >= 8 for stream in streams), 60.0, server.log_text)
    body = {"model": "m", "prompt": [5, POISON, 7], "max_tokens": 4}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body, timeout=180.0)
    join_streams(threads)

    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "poisonous_request")
    assert "the engine died every time that it computed this request" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in undisturbed]
    [after], threads = start_streams(server, bodies[:1])
    join_streams(threads)
    assert after.tokens == undisturbed[0].tokens, "the server goes on"
    recoveries = server.status()["recoveries"]
    measured(f"{server.status()['executor']}: {[(r['process'], round(r['seconds'], 2)) for r in recoveries]}")
