"""A model of the transformers backend in two stages gives the same tokens after a rank or the core was killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rt_architectures import ARCHITECTURES, architecture_checkpoint, greedy_tokens
from rt_equal_tokens import NUM_TOKENS, PROMPTS, tokens_of_ranks
from rt_faults import strike
from rt_server import RunningServer, is_ready, running_server, wait_until
from rt_tiny import tiny_tokenizer

ARGUMENTS = ("--served-model-name", "m", "--dtype", "float32", "--device", "cpu", "--threads", "1")
SIZES = ("--num-kv-blocks", "64", "--max-model-len", "128")


@pytest.mark.slow
def test_two_stages_replay_exactly_after_a_rank_and_the_core_were_killed(tmp_path: Path) -> None:
    folder = architecture_checkpoint(tmp_path / "model", ARCHITECTURES["cohere2"])
    tiny_tokenizer(folder)
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    stages = ("--model", str(folder), "--pipeline-parallel-size", "2")
    with running_server(tmp_path, *stages, *ARGUMENTS, *SIZES) as server:
        assert _tokens(server) == expected
        for victim in ("rank 1", "core"):
            assert _tokens_while(server, victim) == expected
            wait_until(lambda: is_ready(server), 60.0, server.log_text)


def _tokens(server: RunningServer) -> list[list[int]]:
    return tokens_of_ranks(server, "mp", 2)


def _tokens_while(server: RunningServer, victim: str) -> list[list[int]]:
    """The tokens of requests that are running when a process is killed."""
    with ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(_tokens, server)
        wait_until(lambda: server.status()["requests"]["running"] > 0, 60.0, server.log_text)
        strike(server, victim, "killed")
        return tokens.result(120.0)
