"""Whole and streamed answers of the real server are valid by OpenAI's published schemas and have the same text.

tests/engine_unit/test_front_wire_format.py tests every combination of options, with a core that has no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import rt_openai_schema
from rt_server import RunningServer
from rt_sse import read_stream

API_KEY = "key-for-tests"  # the key that conftest.py writes into the server's key file
MODEL = "smollm2-135m"
PARIS = [504, 3575, 282, 4649, 314]  # "The capital of France is"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    with httpx.Client(base_url=server.api_url, headers=headers, timeout=120.0) as made:
        yield made


def both(client: httpx.Client, path: str, num_choices: int, **fields: Any) -> dict[str, Any]:
    """Returns the whole answer, after comparing it with the streamed answer."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 4, **fields}
    is_chat = path == "/v1/chat/completions"
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    document: dict[str, Any] = whole.json()
    rt_openai_schema.check("CreateChatCompletionResponse" if is_chat else "CreateCompletionResponse", document)
    assert [choice["index"] for choice in document["choices"]] == list(range(num_choices))
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = client.post(path, json={**body, "stream": True, "stream_options": options})
    streamed = read_stream(response, num_choices=num_choices, include_usage=True)
    assert streamed.usage is not None
    for count in ("prompt_tokens", "completion_tokens"):
        assert streamed.usage[count] == document["usage"][count]
    for choice in document["choices"]:
        other = streamed.choices[choice["index"]]
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert (other.text, other.finish_reason) == (text, choice["finish_reason"])
    return document


@pytest.mark.parametrize(
    ("prompt", "echo", "logprobs", "n"), list(itertools.product(("text", "lists"), (False, True), (None, 2), (1, 2)))
)
def test_completions(client: httpx.Client, prompt: str, echo: bool, logprobs: int | None, n: int) -> None:
    prompts: Any = "The capital of France is" if prompt == "text" else [PARIS, [0, *PARIS]]
    num_choices = n if prompt == "text" else 2 * n
    document = both(
        client, "/v1/completions", num_choices, prompt=prompts, echo=echo, logprobs=logprobs, n=n, max_tokens=2
    )
    for choice in document["choices"]:
        begins = "<|endoftext|>" if choice["index"] >= n else ""
        assert choice["text"].startswith(f"{begins}The capital of France is Paris" if echo else " Paris")
        if logprobs is not None:
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert "".join(tokens) == choice["text"]
            assert [choice["text"].startswith(*pair) for pair in zip(tokens, offsets, strict=True)] == [True] * len(
                tokens
            )
            assert (choice["logprobs"]["token_logprobs"][0] is None) == echo


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": [" of"], "max_tokens": 20},
        {"max_tokens": 20},
        {"top_p": 0, "temperature": 1.0},
        {"return_token_ids": True},
        {"ignore_eos": True, "max_tokens": 12.0},
    ],
    ids=str,
)
def test_chats(client: httpx.Client, fields: dict[str, Any]) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    document = both(client, "/v1/chat/completions", fields.get("n", 1), messages=question, **fields)
    if fields.get("temperature") != 1.0 or "top_p" in fields:
        assert document["choices"][0]["message"]["content"].startswith("The capital")
    assert document["system_fingerprint"].startswith("rl-")


def test_a_prompt_is_scored_without_a_token_more(client: httpx.Client) -> None:
    """As in evaluations, the log-probabilities of a text are requested without generated tokens."""
    fields = {"prompt": "The capital of France is Paris", "echo": True, "logprobs": 1, "n": 1}
    scored = both(client, "/v1/completions", 1, **fields, max_tokens=0)
    longer = both(client, "/v1/completions", 1, **fields, max_tokens=1)
    assert scored["choices"][0]["text"] == "The capital of France is Paris"
    assert scored["usage"]["completion_tokens"] == 0
    values, more = (answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (scored, longer))
    assert values[1:] == pytest.approx(more[1:-1], abs=1e-4)
    assert values[-1] > -2.0  # Paris is likely
    assert values[0] is None


def test_no_prompt_is_the_beginning_of_a_document(client: httpx.Client) -> None:
    answers = [
        client.post("/v1/completions", json={"model": MODEL, "max_tokens": 3, "temperature": 0, **fields}).json()
        for fields in ({}, {"prompt": ""}, {"prompt": "<|endoftext|>"}, {"prompt": [0]})
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [1, 1, 1, 1]


def test_models_and_refusals(client: httpx.Client, server: RunningServer) -> None:
    rt_openai_schema.check("ListModelsResponse", client.get("/v1/models").json())
    rt_openai_schema.check("Model", client.get(f"/v1/models/{MODEL}").json())
    refusals = [
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5000}),
        client.post("/v1/completions", json={"prompt": "a", "grammar": "root ::= x"}),
        client.post("/v1/chat/completions", json={"messages": [], "stream": True}),
        client.get("/v1/models/other"),
        httpx.get(f"{server.api_url}/v1/models"),
    ]
    assert [response.status_code for response in refusals] == [400, 400, 400, 404, 401]
    for response in refusals:
        rt_openai_schema.check("ErrorResponse", response.json())
