"""Several ranks give the tokens of one rank, through the real server and every executor.

Not every combination is tested. Together with test_rank_death.py, test_tensor_parallel.py and test_external.py, which
compare the same tokens around faults, each executor has stages and shards, and each architecture has a server. `make
faults` tests each architecture with each executor. engine_unit/test_shard_processes.py tests, without servers, each
architecture with each division into ranks, and three ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams
from rt_job import running_job
from rt_server import RunningServer, running_server
from rt_tiny import VARIANTS, tiny_checkpoint, tiny_tokenizer

# The longer ones take several blocks and, together, several steps of prefill.
PROMPTS = [[7 + (5 * index + 3 * position) % 200 for position in range(3 + 20 * index)] for index in range(6)]
NUM_TOKENS = 24

# executor, model, tensor, pipeline
CASES = [
    ("mp", "llama-biases", 1, 1),  # with async_scheduling
    ("mp", "llama-tied", 2, 1),
    ("mp", "qwen2-some-windows", 1, 2),
    ("mp", "mistral-window", 4, 1),
    pytest.param("mp", "qwen3-biases", 2, 2, marks=pytest.mark.slow),
    pytest.param("ray", "mistral-window", 2, 1, marks=pytest.mark.slow),
    ("ray", "qwen3-biases", 2, 2),
    pytest.param("ray", "llama-biases", 4, 1, marks=pytest.mark.slow),
    pytest.param("ray", "qwen2-some-windows", 1, 2, marks=pytest.mark.slow),
    pytest.param("external", "qwen3-biases", 2, 1, marks=pytest.mark.slow),
    pytest.param("external", "mistral-window", 1, 2, marks=pytest.mark.slow),
    pytest.param("external", "llama-tied", 4, 1, marks=pytest.mark.slow),
    pytest.param("external", "qwen2-some-windows", 2, 2, marks=pytest.mark.slow),
]
MODELS = ("llama-biases", "llama-tied", "mistral-window", "qwen2-some-windows", "qwen3-biases")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray of one node that outlives the servers: starting one takes longer than a test."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=4, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = {}
    for variant in sorted(MODELS):
        architecture, overrides = VARIANTS[variant]
        folder = tmp_path_factory.mktemp(variant)
        tiny_checkpoint(folder, architecture, **{"vocab_size": 255, "intermediate_size": 97, **overrides})
        folders[variant] = str(tiny_tokenizer(folder))
    return folders


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> dict[str, list[list[int]]]:
    """The tokens of one rank, in this process."""
    found = {}
    for name, model in models.items():
        with LLM(model, dtype="float32", device="cpu", num_kv_blocks=64, max_model_len=128, threads=1) as llm:
            wishes = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            found[name] = [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, wishes, use_tqdm=False)]
    return found


@pytest.mark.parametrize("executor, model, tensor, pipeline", CASES)
def test_ranks_give_the_tokens_of_one_rank(
    executor: str,
    model: str,
    tensor: int,
    pipeline: int,
    models: dict[str, str],
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    arguments = ["--model", models[model], "--served-model-name", "m", "--dtype", "float32", "--device", "cpu"]
    arguments += ["--num-kv-blocks", "64", "--max-model-len", "128", "--threads", "1"]
    arguments += ["--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(pipeline)]
    if tensor == pipeline == 1:
        arguments += ["--async-scheduling"]
    with contextlib.ExitStack() as stack:
        if executor == "external":
            job = stack.enter_context(running_job(tmp_path, *arguments, world_size=tensor * pipeline))
            server = job.server
        elif executor == "ray":
            address = request.getfixturevalue("ray_address")
            server = stack.enter_context(running_server(tmp_path, *arguments, "--ray-address", address))
        else:
            server = stack.enter_context(running_server(tmp_path, *arguments, "--executor", executor))
        status = server.status()
        assert status["executor"] == executor
        assert [rank["rank"] for rank in status["ranks"]] == list(range(tensor * pipeline))
        assert len({rank["pid"] for rank in status["ranks"]}) == tensor * pipeline
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            got = list(pool.map(lambda prompt: _complete(server, prompt), PROMPTS))
        assert "Traceback" not in server.log_text()
    assert got == expected[model]


def _complete(server: RunningServer, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]
