"""Prompts of several lengths, and the tokens that one rank generates for them. More ranks must generate the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams
from rt_server import RunningServer
from rt_tiny import VARIANTS, tiny_checkpoint, tiny_tokenizer

# The longer prompts need several blocks and, together, several prefill steps.
PROMPTS = [[7 + (5 * index + 3 * position) % 200 for position in range(3 + 20 * index)] for index in range(6)]
NUM_TOKENS = 24
_SIZES = ("--num-kv-blocks", "64", "--max-model-len", "128", "--threads", "1")
ARGUMENTS = ("--served-model-name", "m", "--dtype", "float32", "--device", "cpu", *_SIZES)


def uneven_checkpoint(folder: Path, variant: str) -> str:
    """A value of --model: a tiny checkpoint whose vocabulary and layers cannot be divided evenly between two ranks."""
    architecture, overrides = VARIANTS[variant]
    tiny_checkpoint(folder, architecture, **{"vocab_size": 255, "intermediate_size": 97, **overrides})
    return str(tiny_tokenizer(folder))


def tokens_of_one_rank(model: str) -> list[list[int]]:
    """The greedy tokens of each prompt, computed in this process."""
    with LLM(model, dtype="float32", device="cpu", num_kv_blocks=64, max_model_len=128, threads=1) as llm:
        wishes = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, wishes, use_tqdm=False)]


def tokens_of_ranks(server: RunningServer, executor: str, num_ranks: int) -> list[list[int]]:
    """The same, computed by a server with `ARGUMENTS`. It must have `num_ranks` rank processes of this executor."""
    status = server.status()
    assert status["executor"] == executor
    assert [rank["rank"] for rank in status["ranks"]] == list(range(num_ranks))
    assert len({rank["pid"] for rank in status["ranks"]}) == num_ranks
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        tokens = list(pool.map(lambda prompt: _complete(server, prompt), PROMPTS))
    assert "Traceback" not in server.log_text()
    return tokens


def _complete(server: RunningServer, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = server.client.post(f"{server.api_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids
