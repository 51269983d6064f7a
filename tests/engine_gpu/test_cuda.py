"""On one CUDA device: the same greedy tokens as on the CPU, in float32. Run with `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine import LLM, SamplingParams
from rt_tiny import VARIANTS, tiny_tokenizer, tiny_variant

PROMPTS = [[5, 17, 33, 8, 90], [121] * 30, list(range(4, 44))]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_greedy_tokens_are_those_of_the_cpu(variant: str, tmp_path: Path) -> None:
    folder = tiny_tokenizer(tiny_variant(tmp_path, variant))
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), device=device, dtype="float32", num_kv_blocks=64) as llm:
            outputs = llm.generate(
                PROMPTS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False
            )
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
