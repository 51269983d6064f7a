"""The cost of masks: 16 simultaneous JSON answers, in the steps of workload W1 (128 tokens in, 64 out, bfloat16)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from rayloom_engine.core.sequence import Sequence
from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.structured_outputs import StructuredOutputs

NUM_SEQUENCES = 16
NUM_PROMPT = 128
NUM_STEPS = 63  # decode steps of 64 tokens
MOST = 0.03  # largest share of a decode step's CPU time
# An answer by this schema has more tokens than this test has steps, so no sequence ends early.
LETTERS = {"type": "array", "minItems": 40, "items": {"type": "object", "properties": {"name": {"type": "string"}}}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin://smollm2-135m", dtype="bfloat16", num_kv_blocks=400, threads=1) as llm:
        yield llm


class Timed:
    """A function, and the CPU seconds that this thread used in each call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds.append(time.thread_time() - began)


def test_the_masks_of_sixteen_answers_cost_less_than_three_percent_of_a_step(
    llm: LLM, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=NUM_STEPS + 1, structured_outputs=StructuredOutputs(json=LETTERS)
    )
    for number in range(NUM_SEQUENCES):
        prompt = tuple(range(100 + number, 100 + number + NUM_PROMPT))
        decoding = params.decoding(number, NUM_PROMPT, llm.model.max_model_len, llm.model.vocab_size, 0)
        llm._engine.add(Sequence(request_id=f"{number}", prompt_ids=prompt, params=decoding, eos_token_ids=(2,)))
    while len(llm._engine.step()) < NUM_SEQUENCES:
        pass  # these steps compute prompts and build the vocabulary and the grammar
    masks = Timed(llm._engine._executor._rank._masks.set)
    monkeypatch.setattr(llm._engine._executor._rank._masks, "set", masks)
    step = Timed(llm._engine.step)
    sizes = [len(step()) for _ in range(NUM_STEPS // 2)]
    assert sizes == [NUM_SEQUENCES] * len(sizes), "each step has a token of every answer"
    # The test uses the median, because in some steps another program on the same core fills the CPU's cache.
    mask_s, step_s = median(masks.seconds), median(step.seconds)
    share = mask_s / step_s
    measured(f"masks {mask_s * 1000:.2f} ms of {step_s * 1000:.1f} ms a step, {share:.2%}, one thread")
    assert 0.0 < share < MOST
