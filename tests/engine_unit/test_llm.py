"""The Python API on a tiny random model: settings that cross every layer between the user and the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayloom_engine import LLM, SamplingParams
from rayloom_engine.errors import ConfigError, EngineDead, ModelError, RequestError
from rt_tiny import (
    logits_of,
    tiny_checkpoint,
    tiny_tokenizer,
    tiny_variant,
    transformers_logits,
    transformers_model,
)

PROMPT = [5, 17, 33, 8, 90, 121, 7, 7, 60, 200, 14, 3, 77, 41, 2, 9, 130, 55, 21, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", num_kv_blocks=200, threads=1) as llm:
        yield llm


def _ask(llm: LLM, prompts=PROMPT, **wishes):
    wishes.setdefault("ignore_eos", True)
    return llm.generate(prompts, SamplingParams(**wishes), use_tqdm=False)


def test_greedy_tokens_are_the_most_likely_ones_of_transformers(llm: LLM, folder: Path) -> None:
    (output,) = _ask(llm, temperature=0.0, max_tokens=12)
    ids = output.outputs[0].token_ids
    logits = transformers_logits(folder, [*PROMPT, *ids])
    assert tuple(logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()) == ids


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("variant", ["phi3", "granite", "gemma2", "gemma3", "olmo2", "llama-yarn"])
def test_families_have_the_tokens_of_transformers_in_chunks_and_after_preemptions(
    variant: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kernels`: the C library, or torch."""
    monkeypatch.setenv("RAYLOOM_KERNELS", kernels)
    folder = tiny_tokenizer(tiny_variant(tmp_path, variant))
    prompts = [PROMPT[index:] + PROMPT[:index] for index in range(8)]
    with LLM(str(folder), dtype="float32", num_kv_blocks=8, max_num_batched_tokens=7, threads=1) as small:
        outputs = _ask(small, prompts, temperature=0.0, max_tokens=24)
        # All layers of phi3 have windows, so blocks become free before a preemption is needed.
        assert (small._engine.stats().num_preemptions > 0) is (variant != "phi3")
    reference = transformers_model(folder)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.outputs[0].token_ids
        logits = logits_of(reference, [*prompt, *ids])
        assert tuple(logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()) == ids


def test_a_choice_is_the_same_alone_forked_and_without_a_prefix_cache(llm: LLM, folder: Path) -> None:
    three = _ask(llm, n=3, seed=11, max_tokens=20)[0].outputs
    assert [choice.index for choice in three] == [0, 1, 2]
    assert len({choice.token_ids for choice in three}) == 3
    assert _ask(llm, n=1, seed=11, max_tokens=20)[0].outputs[0].token_ids == three[0].token_ids
    with LLM(str(folder), dtype="float32", num_kv_blocks=200, threads=1, enable_prefix_caching=False) as other:
        again = _ask(other, n=3, seed=11, max_tokens=20)[0].outputs
    assert [choice.token_ids for choice in again] == [choice.token_ids for choice in three]


def test_a_small_pool_and_small_chunks_change_no_token(llm: LLM, folder: Path) -> None:
    prompts = [PROMPT[index:] + PROMPT[:index] for index in range(10)]
    expected = _ask(llm, prompts, seed=3, max_tokens=24)
    with LLM(str(folder), dtype="float32", num_kv_blocks=8, max_num_batched_tokens=7, threads=1) as small:
        got = _ask(small, prompts, seed=3, max_tokens=24)
        assert small._engine.stats().num_preemptions > 0
        assert small._engine.stats().num_free_blocks == 8
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]


def test_prompt_logprobs_are_those_of_transformers_in_one_go_and_in_chunks(llm: LLM, folder: Path) -> None:
    expected = transformers_logits(folder, PROMPT).log_softmax(dim=-1)
    chunked = LLM(str(folder), dtype="float32", num_kv_blocks=20, max_num_batched_tokens=6, threads=1)
    for engine in (llm, chunked):
        (output,) = _ask(engine, prompt_logprobs=2, logprobs=3, max_tokens=2, temperature=0.0)
        assert [entry.token_id for entry in output.prompt_logprobs] == PROMPT[1:]
        for position, entry in enumerate(output.prompt_logprobs):
            assert entry.logprob == pytest.approx(expected[position, PROMPT[position + 1]].item(), abs=1e-4)
            assert [token for token, _ in entry.top] == expected[position].topk(2).indices.tolist()
        first = output.outputs[0].logprobs[0]
        assert (first.rank, len(first.top), len(output.outputs[0].logprobs)) == (1, 3, 2)
        assert first.top[0] == (first.token_id, first.logprob)
        assert sum(math.exp(value) for _, value in first.top) <= 1.0
    chunked.shutdown()


def test_a_request_for_no_tokens_gives_the_prompts_logprobs_alone(llm: LLM) -> None:
    (output,) = _ask(llm, max_tokens=0, prompt_logprobs=0, temperature=0.0)
    (longer,) = _ask(llm, max_tokens=1, prompt_logprobs=0, temperature=0.0)
    assert [entry.logprob for entry in output.prompt_logprobs] == pytest.approx(
        [entry.logprob for entry in longer.prompt_logprobs], abs=1e-4
    )
    (choice,) = output.outputs
    assert (choice.text, choice.token_ids, choice.logprobs, choice.finish_reason) == ("", (), (), "length")


def test_eos_ends_a_sequence_unless_it_is_forbidden_or_ignored(llm: LLM) -> None:
    always_eos = {2: 100.0}
    (output,) = _ask(llm, ignore_eos=False, logit_bias=always_eos, max_tokens=8)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((2,), "stop")
    assert output.outputs[0].stop_reason is None
    (output,) = _ask(llm, ignore_eos=False, logit_bias=always_eos, max_tokens=8, min_tokens=3)
    ids = output.outputs[0].token_ids
    assert (len(ids), ids[-1]) == (4, 2)
    assert 2 not in ids[:-1]
    (output,) = _ask(llm, ignore_eos=True, logit_bias=always_eos, max_tokens=8)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((2,) * 8, "length")


def test_a_stop_id_ends_a_sequence_and_is_its_reason(llm: LLM) -> None:
    (output,) = _ask(llm, stop_token_ids=[44], logit_bias={44: 100.0}, max_tokens=8)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 44)


def test_a_stop_string_frees_the_sequence(llm: LLM) -> None:
    (free,) = _ask(llm, temperature=0.0, max_tokens=16)
    text = free.outputs[0].text
    stop = text[3:5]
    (output,) = _ask(llm, temperature=0.0, max_tokens=16, stop=stop)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert not llm._engine.has_unfinished


def test_the_context_bounds_the_output(llm: LLM) -> None:
    (output,) = _ask(llm, [1] * 120, max_tokens=None)
    assert len(output.outputs[0].token_ids) == 8  # the model has 128 positions


@pytest.mark.parametrize(
    ("prompts", "wishes", "sentence"),
    [
        ([[1] * 120], {"max_tokens": 9}, "the prompt has 120 and 9 more were asked for, 129 in all"),
        ([[]], {}, "the prompt has no tokens"),
        ([[1]], {"stop_token_ids": [256]}, "the model's 256 ids go from 0 to 255"),
    ],
)
def test_a_batch_with_an_impossible_prompt_is_refused_before_anything_runs(llm: LLM, prompts, wishes, sentence) -> None:
    steps = llm._engine.times.num_steps
    with pytest.raises(RequestError, match=sentence):
        _ask(llm, [PROMPT, *prompts], **wishes)
    assert llm._engine.times.num_steps == steps
    assert not llm._engine.has_unfinished


def test_one_params_object_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=3, ignore_eos=True)]
    outputs = llm.generate([[1, 2], [3, 4]], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate([[1, 2]], params)


def test_an_llm_that_was_shut_down_refuses_prompts(folder: Path) -> None:
    llm = LLM(str(folder), num_kv_blocks=10, threads=1)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("x")


def test_adapters_are_refused_because_no_prompt_can_name_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="adapters: no prompt of LLM can name an adapter; leave adapters and"):
        LLM(str(folder), adapters=["a=/a"])


def test_prompts_of_embeddings_are_refused_because_no_prompt_can_be_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prompt_embeds: no prompt of LLM can be embeddings; leave it out"):
        LLM(str(folder), enable_prompt_embeds=True)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing-here"):
        LLM(str(tmp_path / "nothing-here"))


def test_weights_rounded_to_bfloat16_still_answer(folder: Path) -> None:
    with LLM(str(folder), dtype="bfloat16", num_kv_blocks=20, threads=1) as llm:
        assert llm.model.dtype == "bfloat16"
        assert len(_ask(llm, max_tokens=5)[0].outputs[0].token_ids) == 5
        bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert llm.model.compute_dtype == ("bfloat16" if bf16 or torch.cuda.is_available() else "float32")
