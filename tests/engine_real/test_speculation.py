"""The built-in model gives the same answers with speculation, and copies texts and records in fewer steps."""

from __future__ import annotations

from dataclasses import replace

from rayloom_engine.llm import LLM, RequestOutput
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.structured_outputs import StructuredOutputs

SETTINGS = {"dtype": "bfloat16", "threads": 1, "max_model_len": 512, "num_kv_blocks": 128}
TEXT = (
    "The boat was painted green, the house was painted white, and the fence beside the house was painted green. "
    "On Monday the boat left the harbour, on Tuesday the boat came back, and on Friday the boat left again."
)
COPY = [{"role": "user", "content": f"Repeat this text exactly:\n\n{TEXT}"}]
CHAT = [{"role": "user", "content": "Tell me about the history of Rome."}]
ORDERS = "\n".join(
    f"- order_id {number}, customer {name}, quantity {number % 7}"
    for number, name in ((8114302, "Ada Novak"), (5530917, "Jonas Lindqvist"), (2907741, "Ada Novak"))
)
RECORDS = [{"role": "user", "content": f"Write these orders as a JSON array:\n\n{ORDERS}"}]
ORDER = {
    "type": "object",
    "properties": {"order_id": {"type": "integer"}, "customer": {"type": "string"}, "quantity": {"type": "integer"}},
    "required": ["order_id", "customer", "quantity"],
}
JSON = StructuredOutputs(json={"type": "array", "items": ORDER, "minItems": 3, "maxItems": 3})
WORDS = StructuredOutputs(regex="((boat|house|fence) (is|was) (painted green|white)[,.] ?){6,9}")
REQUESTS = (
    (COPY, SamplingParams(temperature=0.0, max_tokens=48)),
    (COPY, SamplingParams(temperature=0.0, max_tokens=48, stop=["came back"], logprobs=1)),
    (COPY, SamplingParams(temperature=0.6, max_tokens=32, seed=3, n=2, frequency_penalty=0.2)),
    (CHAT, SamplingParams(temperature=0.0, max_tokens=32, min_tokens=32, bad_words=["Rome"])),
    (CHAT, SamplingParams(temperature=0.9, max_tokens=32, seed=5, repetition_penalty=1.1, top_p=0.9)),
    (RECORDS, SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=JSON, logprobs=1)),
    (RECORDS, SamplingParams(temperature=0.7, max_tokens=120, seed=4, n=2, structured_outputs=JSON)),
    (COPY, SamplingParams(temperature=0.7, max_tokens=48, seed=6, min_tokens=30, structured_outputs=WORDS)),
)


def _answers(llm: LLM) -> list[RequestOutput]:
    return [llm.chat([messages], params, use_tqdm=False)[0] for messages, params in REQUESTS]


def test_answers_are_the_same_in_fewer_steps() -> None:
    with LLM(**SETTINGS) as llm:
        expected = _answers(llm)
        num_steps = llm.stats().num_steps
    with LLM(speculation="ngram", **SETTINGS) as llm:
        got = _answers(llm)
        stats = llm.stats()
    for before, after in zip(expected, got, strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert (other.token_ids, other.text) == (one.token_ids, one.text)
            assert (other.finish_reason, other.stop_reason) == (one.finish_reason, one.stop_reason)
            assert [entry.token_id for entry in other.logprobs] == [entry.token_id for entry in one.logprobs]
    assert [answer.outputs[0].finish_reason for answer in got[-3:-1]] == ["stop"] * 2
    assert stats.accepted_tokens > 130
    assert stats.num_steps < num_steps - 130


def test_the_models_own_weights_in_int8_draft_greedy_and_sampled_answers() -> None:
    requests = (REQUESTS[0], REQUESTS[4])
    own = {"speculation": "draft", "draft_model": "builtin://smollm2-135m", "draft_quantization": "int8"}
    with LLM(**own, **SETTINGS) as llm:
        got = [llm.chat([messages], params, use_tqdm=False)[0] for messages, params in requests]
        drafted = llm.stats()
        without = [replace(params, speculation=False) for _, params in requests]
        expected = [
            llm.chat([messages], params, use_tqdm=False)[0]
            for (messages, _), params in zip(requests, without, strict=True)
        ]
        assert llm.stats().draft_tokens == drafted.draft_tokens
    assert [answer.outputs[0].token_ids for answer in got] == [answer.outputs[0].token_ids for answer in expected]
    # The costs of this machine decide how many tokens are drafted.
    assert drafted.accepted_tokens > 0.7 * drafted.draft_tokens > 0
