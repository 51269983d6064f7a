"""Two ranks on one GPU give the tokens of one rank in float32, also after the loss of a rank. Run with `pytest -m gpu`.

They exchange through host memory, because NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayloom_engine import LLM, SamplingParams
from rt_faults import aim, breakable_server
from rt_id_stream import stream_ids
from rt_server import RunningServer
from rt_tiny import tiny_checkpoint, tiny_tokenizer

NUM_TOKENS = 300
NUM_COMPARED = 60  # tokens of the answers without a fault
STRIKE_AT = 60  # tokens
PROMPTS = [[5, 17, 33, 8, 90], [121] * 30, list(range(4, 44))]
ARGUMENTS = (
    "--device",
    "cuda",
    "--dtype",
    "float32",
    "--executor",
    "mp",
    "--ranks-per-gpu",
    "2",
    "--hang-seconds",
    "4",
)
LAYOUTS = {"two shards": ("--tensor-parallel-size", "2"), "two stages": ("--pipeline-parallel-size", "2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    folder = tmp_path_factory.mktemp("model")
    return tiny_tokenizer(tiny_checkpoint(folder, **sizes, max_position_embeddings=512, initializer_range=0.05))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), device="cuda", dtype="float32", num_kv_blocks=256) as llm:
        wishes = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, wishes, use_tqdm=False)]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides all GPUs but one from the servers, so that both ranks compute on the same GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])


def _pids(server: RunningServer) -> list[int]:
    return [rank["pid"] for rank in sorted(server.status()["ranks"], key=lambda rank: rank["rank"])]


def _stream_with(server: RunningServer, fault: str) -> list[int]:
    """Returns the tokens of a stream in whose middle the fault happens to rank 1. Rank 0 must keep its process."""
    before = _pids(server)
    cause = aim(server, "rank 1", fault)
    found = []
    for token_id in stream_ids(server, PROMPTS[0], NUM_TOKENS):
        found.append(token_id)
        if len(found) == STRIKE_AT:
            cause()
    after = _pids(server)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False], (before, after)
    print("\n", fault, server.status()["recoveries"][-1])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_on_a_gpu_give_the_tokens_of_one_and_a_stream_outlives_one_of_them(
    layout: str, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    """If a rank is stopped, none of its connections close, so only the core's Abort ends the wait of the other rank."""
    arguments = ("--model", str(folder), "--served-model-name", "m", *ARGUMENTS, *LAYOUTS[layout])
    with breakable_server(tmp_path, *arguments) as server:
        answers = [list(stream_ids(server, prompt, NUM_COMPARED)) for prompt in PROMPTS]
        assert answers == [tokens[:NUM_COMPARED] for tokens in expected]
        assert _stream_with(server, "killed") == expected[0]
        if layout == "two shards":
            assert _stream_with(server, "stopped") == expected[0]
