"""Whole and streamed answers have equal content in OpenAI's schema, for every combination of options that affect it.

The core is a fake with bytes as tokens; tests/engine_real/test_published_schema.py tests the same with a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import rt_openai_schema
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front
from rt_sse import Streamed, read_stream

TEXT = "Zo\u00eb said: one\ntwo."  # one character of two tokens


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    running.do(lambda: setattr(running.core, "script", lambda submit: say(TEXT + submit.sequence_id[-1])(submit)))
    return running


def post(front: FrontUnderTest, path: str, **fields: Any) -> httpx.Response:
    return front.http.post(path, json={"model": MODEL, **fields})


PROMPTS: dict[str, Any] = {"text": "Hi", "texts": ["Hi", "You"], "ids": [72, 105], "lists": [[256, 72], [105]]}


@pytest.mark.parametrize(
    ("prompt", "echo", "logprobs", "n", "with_ids"),
    list(itertools.product(PROMPTS, (False, True), (None, 0, 3), (1, 2), (False, True))),
)
def test_completions(
    front: FrontUnderTest, prompt: str, echo: bool, logprobs: int | None, n: int, with_ids: bool
) -> None:
    fields = {
        "prompt": PROMPTS[prompt],
        "echo": echo,
        "logprobs": logprobs,
        "n": n,
        "return_token_ids": with_ids,
        "max_tokens": 30,
        "seed": 1,
    }
    num_prompts = 2 if prompt in ("texts", "lists") else 1
    response = post(front, "/v1/completions", **fields)
    assert response.status_code == 200, response.text
    whole = response.json()
    rt_openai_schema.check("CreateCompletionResponse", whole)
    assert [choice["index"] for choice in whole["choices"]] == list(range(num_prompts * n))
    options = {"include_usage": True, "continuous_usage_stats": n == 2}
    response = post(front, "/v1/completions", **fields, stream=True, stream_options=options)
    streamed = read_stream(response, num_choices=num_prompts * n, include_usage=True)
    assert streamed.usage == whole["usage"]
    for choice in whole["choices"]:
        other = streamed.choices[choice["index"]]
        assert (other.text, other.finish_reason, other.stop_reason) == (
            choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        assert joined(other.logprobs) == choice["logprobs"]
        assert (other.token_ids or None, other.prompt_token_ids) == (choice["token_ids"], choice["prompt_token_ids"])
        check_completion_logprobs(choice, logprobs, echo=echo)


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Joins the logprobs objects of a stream's chunks."""
    if not parts:
        return None
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def check_completion_logprobs(choice: dict[str, Any], num_top: int | None, *, echo: bool) -> None:
    logprobs = choice["logprobs"]
    if num_top is None:
        assert logprobs is None
        return
    tokens, values, tops = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(tokens) == len(values) == len(tops) == len(logprobs["text_offset"])
    assert (values[0] is None) == (tops[0] is None) == echo
    for token, value, top in list(zip(tokens, values, tops, strict=True))[echo:]:
        assert next(iter(top.items())) == (token, value), "the token itself comes first"
        assert len(top) <= num_top + 1
    for token, offset in zip(tokens, logprobs["text_offset"], strict=True):
        if "\ufffd" in token:
            break  # a token with half a character: offsets count the character twice, as in vLLM
        assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize(
    ("top_logprobs", "n", "with_ids", "stop", "max_tokens"),
    list(itertools.product((None, 0, 2), (1, 3), (False, True), (None, "one"), (None, 3))),
)
def test_chats(
    front: FrontUnderTest,
    top_logprobs: int | None,
    n: int,
    with_ids: bool,
    stop: str | None,
    max_tokens: int | None,
) -> None:
    fields = {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": top_logprobs is not None,
        "top_logprobs": top_logprobs,
        "n": n,
        "return_token_ids": with_ids,
        "stop": stop,
        "max_tokens": max_tokens,
    }
    response = post(front, "/v1/chat/completions", **fields)
    assert response.status_code == 200, response.text
    whole = response.json()
    rt_openai_schema.check("CreateChatCompletionResponse", whole)
    response = post(front, "/v1/chat/completions", **fields, stream=True)
    streamed = read_stream(response, num_choices=n)
    for choice in whole["choices"]:
        other = streamed.choices[choice["index"]]
        assert other.text == choice["message"]["content"]
        assert (other.finish_reason, other.stop_reason) == (choice["finish_reason"], choice["stop_reason"])
        assert (other.token_ids or None) == choice["token_ids"]
        content = [entry for part in other.logprobs for entry in part["content"]]
        assert content == (choice["logprobs"] or {"content": []})["content"]
        assert len(content) in (0, whole["usage"]["completion_tokens"] // n)
    expected = "stop" if max_tokens is None else "length"
    assert {choice["finish_reason"] for choice in whole["choices"]} == {expected}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_obfuscation": True}, {"include_usage": None}], ids=str
)
def test_without_usage_no_chunk_has_the_key(front: FrontUnderTest, path: str, options: Any) -> None:
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    read_stream(post(front, path, **prompt, stream=True, stream_options=options), num_choices=1)


def test_the_usage_of_every_chunk_counts_the_tokens_so_far(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("abc")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": options}
    streamed = read_stream(post(front, "/v1/chat/completions", **chat), num_choices=1, include_usage=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert (counts[0], counts[-1]) == (0, 4)  # first the role; at last three letters and the end token
    assert len({chunk["usage"]["prompt_tokens"] for chunk in streamed.chunks}) == 1
    one = post(front, "/v1/completions", prompt="Hi", stream=True, stream_options=options, max_tokens=2)
    streamed = read_stream(one, num_choices=1, include_usage=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks][-1] == 2


def test_an_echo_of_ids_has_their_special_tokens(front: FrontUnderTest) -> None:
    answer = post(front, "/v1/completions", prompt=[256, 72, 257], echo=True, logprobs=1, max_tokens=1)
    choice = answer.json()["choices"][0]
    assert choice["text"] == "<|im_start|>H<|im_end|>Z"
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "H", "<|im_end|>", "Z"]
    assert choice["logprobs"]["text_offset"] == [0, 12, 13, 23]


def test_offsets_of_an_echo_begin_in_the_text_behind_a_token_that_it_lacks(front: FrontUnderTest) -> None:
    # The prompt is empty, so the server inserts the beginning token. The echoed text does not show this token.
    choice = post(front, "/v1/completions", prompt="", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    assert choice["text"] == "Zo"
    assert choice["logprobs"]["tokens"] == ["<|im_start|>", "Z", "o"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_prompt_logprobs_begin_with_the_prompts_own_token(front: FrontUnderTest) -> None:
    choice = post(front, "/v1/completions", prompt="ab", prompt_logprobs=1).json()["choices"][0]
    assert list(choice["prompt_logprobs"][1]) == ["98", "33"]
    named = post(front, "/v1/completions", prompt="ab", echo=True, logprobs=1, return_tokens_as_token_ids=True).json()
    assert list(named["choices"][0]["logprobs"]["top_logprobs"][1]) == ["token_id:98", "token_id:33"]


def test_models_and_errors_have_openai_shape(front: FrontUnderTest) -> None:
    rt_openai_schema.check("ListModelsResponse", front.http.get("/v1/models").json())
    rt_openai_schema.check("Model", front.http.get(f"/v1/models/{MODEL}").json())
    refusals = [
        post(front, "/v1/completions", prompt="x" * 600),
        post(front, "/v1/completions", prompt="x", n=0),
        post(front, "/v1/chat/completions", messages=[], stream=True),
        front.http.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}),
        front.http.post("/v1/chat/completions", content=b"{}"),
        front.http.get("/v1/models/other"),
        front.http.get("/v1/nothing"),
        front.http.get("/v1/completions"),
    ]
    assert [response.status_code for response in refusals] == [400, 400, 400, 400, 415, 404, 404, 405]
    for response in refusals:
        assert response.headers["content-type"] == "application/json"
        rt_openai_schema.check("ErrorResponse", response.json())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.replace(b"data: [DONE]\n\n", b""), "[DONE] comes 0 times"),
        (lambda body: body + b"data: [DONE]\n\n", "[DONE] comes 2 times"),
        (lambda body: body.replace(b"\n\n", b"\r\n\r\n"), "lines end in CR"),
        (
            lambda body: body.replace(b'"finish_reason":"stop"', b'"finish_reason":null'),
            "a choice has no finish_reason",
        ),
        (lambda body: body.replace(b'"finish_reason":null', b'"finish_reason":"stop"'), "a chunk after the last"),
        (lambda body: body.replace(b'"role":"assistant",', b""), "the role does not come first"),
        (lambda body: body.replace(b'"created":', b'"created":9', 1), "created is"),
        (lambda body: body.replace(b'"index":0', b'"index":1'), "choices [1]"),
        (lambda body: body.replace(b'"choices"', b'"usage":null,"choices"', 1), "nobody asked for it"),
        (lambda body: body.replace(b'"finish_reason":"stop"', b'"finish_reason":"done"'), "'done' is not valid"),
        (lambda body: body[:-1], "in the middle"),
    ],
)
def test_the_reader_finds_faults(front: FrontUnderTest, change: Any, message: str) -> None:
    good = front.chat("Hi", stream=True)
    assert isinstance(read_stream(good, num_choices=1), Streamed)
    bad = httpx.Response(200, headers=dict(good.headers), content=change(good.content))
    with pytest.raises((AssertionError, ValueError)) as caught:
        read_stream(bad, num_choices=1)
    assert message in str(caught.value)


def test_the_schema_check_finds_faults(front: FrontUnderTest) -> None:
    document = front.chat("Hi").json()
    rt_openai_schema.check("CreateChatCompletionResponse", document)
    with pytest.raises(AssertionError, match=r"\$\.system_fingerprint: None is not of type 'string'"):
        rt_openai_schema.check("CreateChatCompletionResponse", {**document, "system_fingerprint": None})
