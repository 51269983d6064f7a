"""Servers give the same tokens as one rank in this process; cases with several ranks run only in `make faults`.

In `make test` the servers have one rank, in a process of its own. This rank receives a plan before it has run the
previous plan. test_rank_death.py, test_tensor_parallel.py, test_external.py and test_ray_placement.py also compare
tokens. They cover stages and shards for each executor. `make faults` adds each architecture with each executor.
engine_unit/test_shard_processes.py cuts each architecture in each way, also for three ranks, without servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rt_equal_tokens import ARGUMENTS, tokens_of_one_rank, tokens_of_ranks, uneven_checkpoint
from rt_job import running_job
from rt_server import running_server

# executor, model, tensor, pipeline
CASES = [
    ("mp", "llama-biases", 1, 1),  # with async_scheduling
    pytest.param("mp", "mistral-window", 2, 1, marks=pytest.mark.slow),
    pytest.param("mp", "qwen2-some-windows", 1, 2, marks=pytest.mark.slow),
    pytest.param("mp", "mistral-window", 4, 1, marks=pytest.mark.slow),
    pytest.param("mp", "llama-tied", 2, 1, marks=pytest.mark.slow),
    pytest.param("mp", "qwen3-biases", 2, 2, marks=pytest.mark.slow),
    pytest.param("ray", "mistral-window", 2, 1, marks=pytest.mark.slow),
    pytest.param("ray", "llama-biases", 4, 1, marks=pytest.mark.slow),
    pytest.param("ray", "qwen2-some-windows", 1, 2, marks=pytest.mark.slow),
    pytest.param("external", "qwen3-biases", 2, 1, marks=pytest.mark.slow),
    pytest.param("external", "mistral-window", 1, 2, marks=pytest.mark.slow),
    pytest.param("external", "llama-tied", 4, 1, marks=pytest.mark.slow),
    pytest.param("external", "qwen2-some-windows", 2, 2, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray of one node that all servers of this file use, because starting Ray takes longer than a test."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=4, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.parametrize("executor, model, tensor, pipeline", CASES)
def test_ranks_give_the_tokens_of_one_rank(
    executor: str, model: str, tensor: int, pipeline: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = uneven_checkpoint(tmp_path / "model", model)
    layout = ("--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline))
    arguments = ["--model", folder, *ARGUMENTS, *layout]
    num_ranks = tensor * pipeline
    if num_ranks == 1:
        arguments.append("--async-scheduling")
    with contextlib.ExitStack() as stack:
        if executor == "external":
            server = stack.enter_context(running_job(tmp_path, *arguments, world_size=num_ranks)).server
        elif executor == "ray":
            address = request.getfixturevalue("ray_address")
            server = stack.enter_context(running_server(tmp_path, *arguments, "--ray-address", address))
        else:
            server = stack.enter_context(running_server(tmp_path, *arguments, "--executor", executor))
        tokens = tokens_of_ranks(server, executor, num_ranks)
    assert tokens == tokens_of_one_rank(folder)
