"""The embedded model in float32 against transformers: 20 prompts, 64 greedy tokens each, equal token for token.

The tokens of transformers are on file. `make faults` checks them with transformers: one pass computes a prompt and its
64 tokens. At every position the most likely token must be the token on file. By induction over the positions, greedy
generation then gives exactly these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayloom_bench.peers.answers import greedy_prompts
from rayloom_engine import LLM, SamplingParams
from rayloom_engine.llm import RequestOutput
from rayloom_engine.models.checkpoint.source import resolve

NUM_TOKENS = 64
ON_FILE = Path(__file__).parents[1] / "data" / "greedy_tokens.json"
# The logit of a token on file is higher than all others by at least 3.3e-4. A smaller lead could be lost if sums are
# computed in another order.
LEAST_LEAD = 2e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHORTER = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)  # enough for a third block


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("builtin://smollm2-135m", None).path


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return [list(ids) for ids in greedy_prompts.prompts(folder)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine with a prefix cache."""
    with LLM(dtype="float32", max_model_len=1024) as made:
        yield made


@pytest.fixture(scope="module")
def all_at_once(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The first answers of the engine. Its prefix cache is empty before these requests."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
    return _ids(outputs)


def _ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def tokens_on_file() -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in json.loads(ON_FILE.read_text())]


def test_every_token_is_the_one_that_transformers_chooses(all_at_once: list[tuple[int, ...]]) -> None:
    assert len(all_at_once) == 20
    assert all_at_once == tokens_on_file()


@pytest.mark.slow
def test_the_tokens_on_file_are_those_of_transformers(folder: Path, prompts: list[list[int]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for number, (prompt, ids) in enumerate(zip(prompts, tokens_on_file(), strict=True)):
        assert len(ids) == NUM_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]]), logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        assert tuple(logits.argmax(dim=-1).tolist()) == ids, f"prompt {number}"
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        assert (first - second).min() > LEAST_LEAD, f"prompt {number}"


def test_tokens_are_the_same_alone_and_with_a_hot_prefix_cache(
    llm: LLM, prompts: list[list[int]], all_at_once: list[tuple[int, ...]]
) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)  # enough for a block after the prompt's
    for prompt, ids in zip(prompts[7::7], all_at_once[7::7], strict=True):
        assert _ids(llm.generate([prompt], short, use_tqdm=False)) == [ids[:18]]
    hot = llm.generate(prompts, short, use_tqdm=False)
    assert _ids(hot) == [ids[:18] for ids in all_at_once]
    # Every full block except the last token's block was found in the cache.
    assert [output.num_cached_tokens for output in hot] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_tokens_are_the_same_when_the_pool_is_so_small_that_requests_are_preempted(
    prompts: list[list[int]], all_at_once: list[tuple[int, ...]]
) -> None:
    with LLM(dtype="float32", num_kv_blocks=48, max_num_batched_tokens=200) as llm:
        outputs = llm.generate(prompts[1::2], SHORTER, use_tqdm=False)
        stats = llm._engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == 48
    assert _ids(outputs) == [ids[:40] for ids in all_at_once[1::2]]


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_crowd(llm: LLM, prompts: list[list[int]]) -> None:
    wishes = [
        SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(8)
    ]
    crowd = _ids(llm.generate(prompts[:8], wishes, use_tqdm=False))
    alone = [_ids(llm.generate([prompts[i]], wishes[i], use_tqdm=False))[0] for i in (3, 6)]
    assert crowd[3::3] == alone
    assert len(set(crowd)) == 8
