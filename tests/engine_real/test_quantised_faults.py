"""A quantised checkpoint on two ranks gives the tokens of one rank, even if a rank is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rt_faults import aim, breakable_server
from rt_quantised import quantised_checkpoint
from rt_server import RunningServer, running_server
from rt_streams import Said, disturb, undisturbed
from rt_tiny import tiny_checkpoint, tiny_tokenizer

ARGUMENTS = ("--dtype", "bfloat16", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "512")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    sizes = {"num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 1024}
    dense = tiny_checkpoint(folder / "dense", "Qwen3ForCausalLM", **sizes)
    quantised_checkpoint(dense, "awq", folder / "awq")
    return tiny_tokenizer(folder / "awq", has_tools=True)


@pytest.fixture(scope="module")
def expected(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    with running_server(tmp_path_factory.mktemp("one"), "--model", str(quantised), *ARGUMENTS) as server:
        assert server.status()["model"]["quantization"] == "awq-int4-g32"
        return undisturbed(server)


@pytest.fixture(scope="module")
def server(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    extra = ("--executor", "mp", "--pipeline-parallel-size", "2", "--hang-seconds", "4")
    with breakable_server(tmp_path_factory.mktemp("mp"), "--model", str(quantised), *ARGUMENTS, *extra) as running:
        yield running


def test_tokens_are_those_of_one_rank_also_after_a_kill(server: RunningServer, expected: list[Said]) -> None:
    pids = {f"rank {rank['rank']}": rank["pid"] for rank in server.status()["ranks"]}
    seen = disturb(server, expected, aim(server, "rank 0", "killed"))
    assert seen.failures == []
    assert [rank for rank, pid in seen.pids(after=True).items() if pid != pids[rank]] == ["rank 0"]
