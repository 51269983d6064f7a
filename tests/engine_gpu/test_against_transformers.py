"""Greedy tokens on a GPU against transformers on the same card. Run with `pytest -m gpu`.

transformers computes each prompt, followed by our tokens, in one pass. Its most likely token at each position is
compared with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine import LLM, SamplingParams
from rt_tiny import tiny_checkpoint, tiny_tokenizer

NUM_TOKENS = 32
PROMPTS = [[3 + (7 * index + 5 * place) % 250 for place in range(4 + 9 * index)] for index in range(10)]
# The sizes of SmolLM2-135M, but with fewer layers, a smaller vocabulary and a shorter context.
SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_checkpoint(tmp_path_factory.mktemp("model"), **SIZES))


def _ours(folder: Path, dtype: str) -> list[list[int]]:
    with LLM(str(folder), device="cuda", dtype=dtype, num_kv_blocks=256) as llm:
        wishes = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, wishes, use_tqdm=False)]


def _choices(folder: Path, dtype: torch.dtype, answers: list[list[int]]) -> list[list[int]]:
    """The most likely token at each position of the answers, according to transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda")
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*prompt, *answer]], device="cuda")).logits[0]
        found.append(logits_TV[len(prompt) - 1 : -1].argmax(dim=-1).tolist())
    return found


def _num_equal(first: list[list[int]], second: list[list[int]]) -> int:
    return sum(a == b for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.gpu
def test_in_float32_every_token_is_the_one_that_transformers_chooses(folder: Path) -> None:
    answers = _ours(folder, "float32")
    assert _choices(folder, torch.float32, answers) == answers


@pytest.mark.gpu
def test_in_bfloat16_as_many_tokens_as_in_transformers_are_those_of_float32(folder: Path) -> None:
    answers = _ours(folder, "bfloat16")
    exact = _choices(folder, torch.float32, answers)
    theirs = _choices(folder, torch.bfloat16, answers)
    num = len(PROMPTS) * NUM_TOKENS
    print(
        f"\nof {num} tokens, as in float32: ours {_num_equal(answers, exact)}, transformers {_num_equal(theirs, exact)}"
    )
    assert _num_equal(answers, exact) >= _num_equal(theirs, exact) - num // 50
