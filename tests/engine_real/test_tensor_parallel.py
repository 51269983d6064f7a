"""Ranks that share layers, behind the real server: the tokens of one rank, also when a rank is killed on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rt_server import RunningServer, running_server, wait_until
from rt_streams import NUM_TOKENS, completion_body, join_streams, start_streams
from rt_tiny import tiny_checkpoint, tiny_tokenizer

NUM_STREAMS = 4
ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "64")
LAYOUTS = {
    "2 x 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "4 x 1": ("--tensor-parallel-size", "4"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, "Qwen3ForCausalLM", num_hidden_layers=4, head_dim=16, max_position_embeddings=512)
    return str(tiny_tokenizer(folder))


def _tokens_of(server: RunningServer) -> list[list[str]]:
    streams, threads = start_streams(server, [completion_body(index) for index in range(NUM_STREAMS)])
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    return [stream.tokens for stream in streams]


@pytest.fixture(scope="module")
def expected(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What one rank says, undisturbed."""
    with running_server(tmp_path_factory.mktemp("one"), "--model", model, *ARGUMENTS) as server:
        return _tokens_of(server)


@pytest.fixture(scope="module", params=LAYOUTS)
def server(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("four")
    with running_server(folder, "--model", model, *ARGUMENTS, *LAYOUTS[request.param], "--executor", "mp") as running:
        yield running
        text = running.log_text()
    assert "Traceback" not in text, text[-4000:]


def test_four_ranks_say_what_one_says(server: RunningServer, expected: list[list[str]]) -> None:
    assert len({rank["pid"] for rank in server.status()["ranks"]}) == 4
    assert _tokens_of(server) == expected


@pytest.mark.parametrize("victim", [0, 2, 3])  # in 4 x 1, rank 0 does not notice of itself that rank 2 is gone
def test_a_killed_rank_costs_a_pause_and_no_request(
    victim: int, server: RunningServer, expected: list[list[str]]
) -> None:
    before = {rank["rank"]: rank["pid"] for rank in server.status()["ranks"]}
    num_recoveries = len(server.status()["recoveries"])
    streams, threads = start_streams(server, [completion_body(index) for index in range(NUM_STREAMS)])
    wait_until(
        lambda: all(len(stream.tokens) >= 8 for stream in streams),
        60.0,
        lambda: f"tokens so far: {[len(s.tokens) for s in streams]}\n{server.log_text()[-2000:]}",
    )
    os.kill(before[victim], signal.SIGKILL)
    received = [len(stream.tokens) for stream in streams]
    assert max(received) < NUM_TOKENS, f"the fault came too late: {received}"
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == expected

    wait_until(lambda: server.status()["state"] == "serving", 30.0, lambda: str(server.status()))
    status = server.status()
    after = {rank["rank"]: rank["pid"] for rank in status["ranks"]}
    assert [rank for rank in after if after[rank] != before[rank]] == [victim], "the others keep process and weights"
    assert len(status["recoveries"]) == num_recoveries + 1
    assert status["recoveries"][-1]["process"] == f"rank {victim}"


def test_four_ray_actors_say_what_one_rank_says(model: str, expected: list[list[str]], tmp_path: Path) -> None:
    with running_server(tmp_path, "--model", model, *ARGUMENTS, *LAYOUTS["2 x 2"], "--executor", "ray") as server:
        assert [rank["rank"] for rank in server.status()["ranks"]] == [0, 1, 2, 3]
        assert _tokens_of(server) == expected
