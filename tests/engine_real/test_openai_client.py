"""The official `openai` client, without retries, against the real server process with the embedded model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from rt_lazy import LazyModule
from rt_server import RunningServer

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

API_KEY = "key-for-tests"  # the key that conftest.py writes into the server's key file
MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key=API_KEY, max_retries=0, timeout=120.0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (42, 8)


def test_a_chat_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_the_text_of_a_chat_stream_comes_in_pieces(client: openai.OpenAI) -> None:
    # A front that waits 100 ms for a CPU sends all tokens of this time in one chunk. 128 tokens take about a second.
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, max_tokens=128, extra_body={"min_tokens": 128}
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert sum(map(bool, pieces)) > 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == ANSWER + "<|im_end|>"
    for entry in content:
        assert bytes(entry.bytes or ()).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        # With greedy sampling the chosen token is the most likely token. The list is in descending order.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        falling = [top.logprob for top in entry.top_logprobs]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] <= 0.0


def test_the_probabilities_of_the_whole_vocabulary_add_up_to_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, logprobs=True, top_logprobs=-1, extra_body={"prompt_logprobs": 1}
    )
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    probabilities = [math.exp(top.logprob) for top in answer.choices[0].logprobs.content[0].top_logprobs]
    assert len(probabilities) == 49152
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-3)
    assert answer.usage is not None
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens
    # The prompt is short, because the answer has 3 MB for each of its tokens.
    scored = client.completions.create(
        model=MODEL, prompt="The capital of", max_tokens=1, extra_body={"prompt_logprobs": -1}
    )
    first, *entries = scored.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert [len(entry) for entry in entries] == [49152, 49152]


def test_a_beam_search_finds_answers_that_are_at_least_as_likely_as_the_greedy_one(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8, "logprobs": 0}
    searching = {"use_beam_search": True, "length_penalty": 0.0, "ignore_eos": True}

    def sums(answer: Any) -> list[float]:
        return [sum(choice.logprobs.token_logprobs) for choice in answer.choices]

    greedy = client.completions.create(**fields, temperature=0, extra_body={"ignore_eos": True})
    one = client.completions.create(**fields, extra_body=searching)
    assert one.choices[0].text == greedy.choices[0].text
    assert sums(one) == pytest.approx(sums(greedy), abs=1e-3)

    four = client.completions.create(**fields, n=4, extra_body={**searching, "return_token_ids": True})
    found = sums(four)
    assert found == sorted(found, reverse=True)
    assert found[0] >= sums(greedy)[0] - 1e-3
    assert len({choice.text for choice in four.choices}) == 4
    best = four.choices[0].model_extra
    scored = client.completions.create(
        model=MODEL,
        prompt=[*best["prompt_token_ids"], *best["token_ids"]],
        max_tokens=0,
        extra_body={"prompt_logprobs": 0},
    )
    entries = scored.choices[0].model_extra["prompt_logprobs"][-8:]
    assert sum(next(iter(entry.values()))["logprob"] for entry in entries) == pytest.approx(found[0], abs=1e-3)
    assert four.usage is not None
    assert four.usage.completion_tokens == 32


def test_completion_with_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith("The capital of France is Paris")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None
    assert [
        choice.text[offset:].startswith(token)
        for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == [True] * len(logprobs.tokens)


def test_completion_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0)
    stream = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=3, temperature=0)
    assert [choice.index for choice in together.choices] == [0, 1]
    for choice, prompt in zip(together.choices, prompts, strict=True):
        alone = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0)
        assert choice.text == alone.choices[0].text


def test_three_choices_differ_and_come_back_with_the_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=7,
            temperature=1.0,
            max_tokens=24,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_a_seed_means_the_same_tokens_and_another_seed_others(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=24, seed=seed)
        return answer.choices[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_stop_strings(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[" France"])
    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "stop"


def test_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=3)
    assert answer.choices[0].message.content == "The capital of"
    assert answer.choices[0].finish_reason == "length"


def test_fields_of_vllm_pass_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=6, extra_body={"top_k": 1, "ignore_eos": True, "min_tokens": 6}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_refusals_are_the_clients_own_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="a", max_tokens=2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as negative:
        client.completions.create(model=MODEL, prompt="a", max_tokens=-1)
    assert negative.value.param == "max_tokens"
    tool = {"type": "function", "function": {"name": "a b", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[tool])
    assert tools.value.param == "tools[0].function.name"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="a")


def test_a_wrong_key_is_an_authentication_error(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.chat.completions.create(model=MODEL, messages=QUESTION)
    assert refused.value.code == "invalid_api_key"
