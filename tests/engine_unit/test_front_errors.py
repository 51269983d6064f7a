"""Every refusal of a request has its status, and OpenAI's error object with a sentence and without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from rayloom_engine.errors import RequestError
from rayloom_engine.front.generation.generation import Generation
from rayloom_engine.front.http.tenant import Caller
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ChatRequest, DetokenizeRequest
from rayloom_engine.sampling_params import SamplingParams
from rt_front import MODEL, FrontUnderTest, running_front

MAX_BODY = 100_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), max_body_bytes=MAX_BODY, max_output_tokens=400) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> Iterator[FrontUnderTest]:
    running.do(running.core.reset)
    yield running
    assert running.do(lambda: running.service.lifecycle.num_in_flight) == 0


JSON = {"Content-Type": "application/json"}


def refused(response: httpx.Response, status: int, field: str | None = None, code: str | None = None) -> str:
    """Returns the message of a refusal, after checking all other parts of the refusal."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (field, code)
    assert "Traceback" not in response.text
    return error["message"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"prompt": NaN}', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8: bad byte at offset 12"),
        (rb'{"prompt": "\ud800 "}', "half of a surrogate pair in the escape before byte 18"),
        (b"[1]", "must be a JSON object, it is a list"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "nested too deeply"),
        (b'{"a":' * 50_000, "larger than 100000 bytes"),
        (b"[" * 50_000, "nested too deeply"),
    ],
    ids=["empty", "cut", "rest", "nan", "bad utf-8", "half surrogate", "list", "65 deep", "too large", "endless"],
)
def test_broken_bodies(front: FrontUnderTest, body: bytes, part: str) -> None:
    message = refused(front.http.post("/v1/completions", content=body, headers=JSON), 413 if "larger" in part else 400)
    assert part in message


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.example+json", "text/x+json ; a=b"],
)
def test_json_content_types_are_taken(front: FrontUnderTest, kind: str) -> None:
    answer = front.http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers={"Content-Type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "+json", "json"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_other_content_types_are_refused_before_the_body(front: FrontUnderTest, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    message = refused(front.http.post(path, content=b"{}", headers=headers), 415, None, "unsupported_media_type")
    shown = f'"{kind}"' if kind else "missing"
    assert message == (
        f"the Content-Type is {shown}; this path takes JSON, so send the header `Content-Type: application/json` "
        "(curl: add -H 'Content-Type: application/json')"
    )


def test_brackets_in_strings_are_not_nesting(front: FrontUnderTest) -> None:
    assert front.complete("[" * 100 + '"{').status_code == 200


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(front: FrontUnderTest) -> None:
    chunks = (b"x" * 10_000 for _ in range(20))
    assert "larger than" in refused(front.http.post("/v1/completions", content=chunks, headers=JSON), 413)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 401}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "a"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [258]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": 1}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"priority": 2**40}, "priority"),
        *(
            ({name: 10**30}, name)
            for name in ("n", "top_k", "seed", "min_tokens", "max_tokens", "prompt_logprobs", "priority")
        ),
        ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 10**30}, "top_logprobs"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {"1": 10**30}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {str(10**30): 1}}, "logit_bias"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "r" * 65, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_fields_are_named(front: FrontUnderTest, fields: dict[str, Any], field: str) -> None:
    message = refused(front.chat(**fields), 400, field)
    assert field.split("[")[0].split(".")[0] in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("model", "document", "location"),
    [
        (ChatRequest, {"messages": [], "stop_token_ids": ["a"] * 1000}, "stop_token_ids[0]"),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}, "tokens[0]"),
    ],
    ids=["stop_token_ids", "tokens"],
)
def test_a_list_full_of_errors_costs_one(model: Any, document: dict[str, Any], location: str) -> None:
    with pytest.raises(RequestError, match="must be an integer") as caught:
        parse_request(model, document)
    assert caught.value.field == location
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


def test_a_list_that_is_too_long_is_refused_before_it_is_used() -> None:
    with pytest.raises(RequestError, match="at most 1048576") as caught:
        parse_request(DetokenizeRequest, {"tokens": [1] * (2**20 + 1)})
    assert caught.value.field == "tokens"


@pytest.mark.parametrize("prompt", [[], 5, ["a", 1], [[1], "a"], [True], [-1], [258], [[300]], [[]], [1.5], [["1"]]])
def test_bad_prompts_are_refused(front: FrontUnderTest, prompt: object) -> None:
    assert "prompt" in refused(front.complete(prompt), 400, "prompt")


@pytest.mark.parametrize(
    ("field", "used", "unused"),
    [
        ("audio", {}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("prediction", {"type": "content"}, None),
        ("web_search_options", {}, None),
        ("suffix", "x", None),
        ("chat_template", "{{ 1 }}", None),
    ],
)
def test_fields_that_are_not_implemented_are_refused_unless_unused(
    front: FrontUnderTest, field: str, used: object, unused: object
) -> None:
    assert field in refused(front.chat(**{field: used}), 400, field)
    assert front.chat(**{field: unused}).status_code == 200


def test_best_of_must_equal_n(front: FrontUnderTest) -> None:
    refused(front.complete("x", best_of=2), 400, "best_of")
    assert front.complete("x", best_of=1).status_code == 200


def test_more_than_the_context_names_all_three_numbers(front: FrontUnderTest) -> None:
    message = refused(front.complete("x" * 500, max_tokens=20), 400, None, "context_length_exceeded")
    assert all(number in message for number in ("512", "500", "20"))
    message = refused(front.complete("x" * 600), 400, None, "context_length_exceeded")
    assert "600" in message
    refused(front.chat("x" * 600), 400, None, "context_length_exceeded")
    # The longest token has 12 characters, so the front refuses this text without tokenising it.
    assert "characters" in refused(front.complete("x" * (512 * 12 + 1)), 400, None, "context_length_exceeded")


def test_more_choices_than_the_queue_holds_are_refused(front: FrontUnderTest) -> None:
    message = refused(front.complete(["x"] * 1025), 400)
    assert "1025" in message
    assert "1024" in message
    # The refusal comes before any text is tokenised. After tokenising, it would say that these texts are too long.
    assert "1152" in refused(front.complete(["x" * (512 * 12 + 1)] * 9, n=128), 400)


def test_ids_of_the_tokenizer_that_the_model_lacks_are_refused(front: FrontUnderTest) -> None:
    def shrink() -> None:
        text = front.service.text
        assert text is not None
        # Some fine-tunes have a padding token without an embedding. Here this token is <|im_end|>, id 257.
        front.service.text = replace(text, model=msgspec.structs.replace(text.model, vocab_size=257))

    whole = front.do(lambda: front.service.text)
    front.do(shrink)
    try:
        assert "257" in refused(front.complete("a<|im_end|>"), 400, "prompt")
        assert "257" in refused(front.complete([[97], [257]]), 400, "prompt")
        assert "257" in refused(front.chat("a"), 400, "messages")
        assert front.complete("a").status_code == 200
    finally:
        front.do(lambda: setattr(front.service, "text", whole))


def test_a_text_that_cannot_be_encoded_is_refused_and_leaves_nothing_behind(front: FrontUnderTest) -> None:
    text = front.do(lambda: front.service.text)

    settings = {"request_id": "r", "prompts": [(1,), (10**30,)], "params": SamplingParams(), "caller": Caller()}
    with pytest.raises(RequestError, match="cannot be handed to the engine"):
        front.run(Generation.start(front.service, text, fresh_seed=1, **settings))
    assert front.do(lambda: list(front.service.client.unfinished())) == []
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0
    assert front.chat().status_code == 200


def test_a_template_that_refuses_gives_its_words(front: FrontUnderTest) -> None:
    chat = {"continue_final_message": True, "add_generation_prompt": True}
    refused(front.chat(**chat), 400, "continue_final_message")


def test_another_model_is_not_found(front: FrontUnderTest) -> None:
    assert "gpt-4" in refused(front.chat(model="gpt-4"), 404, "model", "model_not_found")


def test_unknown_paths_and_methods_use_the_same_format(front: FrontUnderTest) -> None:
    refused(front.http.get("/v1/nothing"), 404)
    response = front.http.get("/v1/chat/completions")
    refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_full_queue_is_429_with_retry_after(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("queue_full", "1024 sequences wait")))
    for stream in (False, True):
        response = front.chat(stream=stream)
        assert "1024" in refused(response, 429, None, "queue_full")
        assert response.headers["retry-after"] == "7"


def test_the_cores_other_refusals_are_400(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("too_long", "too long for the cache")))
    assert "cache" in refused(front.chat(), 400, None, "context_length_exceeded")
    front.do(lambda: setattr(front.core, "refusal", ("invalid", "cannot do that")))
    assert "cannot" in refused(front.chat(), 400)


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        ("/v1/completions", {"prompt": "Hi"}, "service_unavailable_error"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "service_unavailable_error"),
        ("/v1/responses", {"input": "Hi"}, "service_unavailable_error"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}, "overloaded_error"),
    ],
)
def test_an_adapter_that_a_rank_cannot_load_is_a_fault_of_the_server(
    front: FrontUnderTest, path: str, fields: dict[str, Any], kind: str
) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("adapter", "/adapters/sql: the files have changed")))
    num_failed = front.do(lambda: front.service.metrics.failed.value())
    for stream in (False, True):
        response = front.http.post(path, json=fields | {"model": MODEL, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, response.headers["retry-after"]) == (503, "30")
        assert (error["type"], error["code"], error["param"]) == (kind, "adapter_failed", None)
        assert error["message"] == "/adapters/sql: the files have changed"
    assert front.do(lambda: front.service.metrics.failed.value()) == num_failed + 2


def test_an_adapter_that_a_rank_cannot_load_any_more_ends_a_stream_with_an_error_event(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream() as stream:
        received = [next(stream)]
        front.do(lambda: front.core.refuse(front.core.submits[-1].sequence_id, "adapter", "its files have changed"))
        received += list(stream)
    error = received[-1]["error"]
    assert (error["code"], error["message"]) == ("adapter_failed", "its files have changed")


def test_a_poisonous_request_is_a_500_of_its_own_or_an_error_event(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("poison", "the engine died of it")))
    response = front.chat()
    assert refused(response, 500, None, "poisonous_request") == "the engine died of it"
    assert response.headers["x-should-retry"] == "false"
    front.do(lambda: setattr(front.core, "hold_after", 3))
    front.do(lambda: setattr(front.core, "refusal", None))
    with front.chat_stream() as stream:
        front.wait_until(lambda: len(front.core.submits) == 2, "the stream is submitted")
        received = [next(stream)]
        front.do(lambda: front.core.refuse(front.core.submits[-1].sequence_id, "poison", "the engine died of it"))
        received += list(stream)
    assert received[-1]["error"]["code"] == "poisonous_request"


def test_one_refused_choice_ends_the_request_and_frees_the_others(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("queue_full", "no room")))
    refused(front.chat(n=3), 429, None, "queue_full")
    front.wait_until(lambda: len(front.core.submits) == 3, "all choices were submitted")
    assert front.do(lambda: front.service.client.num_silent()) == 0


def test_request_ids_are_echoed_or_made(front: FrontUnderTest) -> None:
    assert front.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = front.http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"]
    assert len(made) == 32


def test_tokenize_needs_either_prompt_or_messages(front: FrontUnderTest) -> None:
    refused(front.http.post("/tokenize", json={"model": MODEL}), 400, "prompt")
    refused(front.http.post("/tokenize", json={"prompt": 5}), 400, "prompt")
    refused(front.http.post("/detokenize", json={"tokens": [999]}), 400, "tokens")
    refused(front.http.post("/detokenize", json={"tokens": ["a"]}), 400, "tokens[0]")


def test_a_large_body_is_parsed_like_a_small_one(front: FrontUnderTest) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 90_000}).encode()
    refused(front.http.post("/v1/completions", content=body, headers=JSON), 400, None, "context_length_exceeded")
