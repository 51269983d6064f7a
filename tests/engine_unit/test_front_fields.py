"""The fields of requests: used, known to change nothing, or refused; and unusual values that OpenAI's schema allows.

Bad values of known fields are in test_front_errors.py and test_front_bad_values.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.other_apis import NOT_IMPLEMENTED, WITHOUT_EFFECT
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ENDPOINTS, ChatRequest, CompletionRequest, TokenizeRequest
from rayloom_engine.front.openai.models import model_root
from rayloom_engine.text.chat_template import ChatTemplate
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front

HI = {"messages": [{"role": "user", "content": "Hi"}]}
# Fields of other servers that change the answer: for grammars, lengths, samplers, reasoning and adapters.
CHANGES_THE_ANSWER = (
    *("grammar", "json_schema", "structural_tag", "stop_regex"),
    *("echo", "logprob_token_ids", "truncation_side", "repetition_detection", "lora_path"),
    *("thinking_token_budget", "include_reasoning", "thinking", "reasoning"),
    *("typical_p", "mirostat", "dry_multiplier", "xtc_probability"),
    *("max_new_tokens", "n_predict", "min_new_tokens", "spaces_between_special_tokens"),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    folder = tmp_path_factory.mktemp("front")
    with running_front(folder) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def refusal(model: type[Any], **fields: Any) -> str:
    """The message that refuses a request with these fields. The first field is the wrong one."""
    with pytest.raises(RequestError) as caught:
        parse_request(model, {**(HI if model is ChatRequest else {}), **fields})
    assert caught.value.field == next(iter(fields))
    return str(caught.value)


@pytest.mark.parametrize("name", CHANGES_THE_ANSWER)
def test_no_field_that_changes_the_answer_is_ignored(front: FrontUnderTest, name: str) -> None:
    response = front.chat(**{name: "root ::= x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", sorted(NOT_IMPLEMENTED))
def test_a_field_that_is_not_implemented_may_ask_for_nothing(name: str) -> None:
    model = ChatRequest if name in CompletionRequest.model_fields else CompletionRequest
    field = NOT_IMPLEMENTED[name]
    assert name in refusal(model, **{name: {"some": "use"}})
    for neutral in (None, *field.neutral):
        parse_request(model, {**HI, name: neutral} if model is ChatRequest else {name: neutral})


def test_a_refusal_has_the_cure_in_json() -> None:
    assert refusal(ChatRequest, early_stopping=True) == (
        "early_stopping is not supported by this server; leave it out or set it to false"
    )
    assert refusal(ChatRequest, images=[{}]) == "images is not supported by this server; leave it out or set it to []"
    assert refusal(ChatRequest, n_predict=5) == "n_predict is not supported by this server; use max_tokens instead"
    assert refusal(ChatRequest, reasoning_effort=True) == (
        'reasoning_effort must be "none", "minimal", "low", "medium", "high", "xhigh" or "max", given true'
    )


def test_fields_without_effect_change_nothing(front: FrontUnderTest) -> None:
    for value in ("x", 5, {"a": [None]}, True):
        plain = front.chat(seed=1)
        labelled = front.chat(seed=1, **dict.fromkeys(WITHOUT_EFFECT, value))
        assert labelled.status_code == 200
        assert labelled.json()["choices"] == plain.json()["choices"]
    submits = front.do(lambda: list(front.core.submits))
    assert len({submit.params for submit in submits}) == len({submit.prompt_ids for submit in submits}) == 1


def test_each_field_is_in_one_place() -> None:
    assert set(NOT_IMPLEMENTED) & set(WITHOUT_EFFECT) == set()
    declared = {path: set(model.model_fields) for path, model in ENDPOINTS.items()}
    for path, names in declared.items():
        assert names & set(WITHOUT_EFFECT) == set(), path
        assert names & set(NOT_IMPLEMENTED) <= {"echo"}, path


def test_an_unknown_field_is_refused_with_the_nearest_that_is_known() -> None:
    assert refusal(ChatRequest, temprature=0) == (
        '"temprature" is not a field of this request; temperature is. Leave out fields that this server does not know'
    )
    assert refusal(ChatRequest, best_off=1, qqq=1) == (
        '"best_off" is not a field of this request. "qqq" is not a field of this request. '
        "Leave out fields that this server does not know"
    )
    assert "but of /v1/chat/completions" in refusal(CompletionRequest, messages=[])
    assert "but of /v1/completions" in refusal(TokenizeRequest, best_of=1)


def test_null_means_the_default_for_every_field() -> None:
    parse_request(ChatRequest, {**HI, "no_such_field": None, "temperature": None, "tools": None})


def test_a_thousand_unknown_fields_are_one_short_refusal(front: FrontUnderTest) -> None:
    response = front.chat(**{f"{'x' * 500}{index}": index for index in range(1000)})
    assert response.status_code == 400
    assert "995 more" in response.json()["error"]["message"]
    assert len(response.text) < 1000


def test_stream_options_have_fields_of_their_own() -> None:
    def options(**fields: Any) -> None:
        parse_request(ChatRequest, {**HI, "stream": True, "stream_options": fields})

    options(include_usage=True, include_obfuscation=False, anything=None)
    with pytest.raises(RequestError, match=r'"stream_options.include_usages" is not a field .*; include_usage is'):
        options(include_usages=True)


@pytest.mark.parametrize("name", ["n", "seed", "top_k", "min_tokens", "max_tokens", "logprobs", "priority", "best_of"])
@pytest.mark.parametrize(("number", "value"), [("1.0", 1), ("1e0", 1), ("10e-1", 1), ("-0.0", 0)])
def test_a_number_without_a_fraction_is_an_integer(name: str, number: str, value: int) -> None:
    request = parse_request(CompletionRequest, {name: float(number)})
    assert getattr(request, name) == value
    assert type(getattr(request, name)) is int


@pytest.mark.parametrize("value", [4.5, "4", "4.0", True, [4], 1e-9])
def test_a_value_that_is_no_whole_number_is_refused(value: object) -> None:
    assert "max_tokens must be an integer" in refusal(CompletionRequest, max_tokens=value)


def test_whole_numbers_everywhere(front: FrontUnderTest) -> None:
    response = front.complete(
        [72.0, 105], n=1.0, max_tokens=4.0, seed=-1.0, top_k=-1.0, stop_token_ids=[65.0, 66], logprobs=1.0
    )
    assert response.status_code == 200
    submit = front.do(lambda: front.core.submits[0])
    assert submit.prompt_ids == (72, 105)
    assert (submit.params.max_tokens, submit.params.stop_token_ids, submit.params.logprobs) == (4, (65, 66), 1)
    assert front.complete([[72.0], [105.0]]).status_code == 200
    assert front.http.post("/detokenize", json={"tokens": [72.0, 1.05e2]}).json() == {"prompt": "Hi"}
    assert front.http.post("/detokenize", json={"tokens": [72.5]}).status_code == 400


def test_values_that_openai_allows_and_others_refuse(front: FrontUnderTest) -> None:
    for fields in ({"top_p": 0}, {"top_logprobs": 0}, {"stop": ""}, {"stop": ["", "x"]}, {"temperature": 2.5}):
        assert front.chat(**fields).status_code == 200, fields
    submits = front.do(lambda: list(front.core.submits))
    assert (submits[0].params.top_p, submits[4].params.temperature) == (0.0, 2.5)


def test_reasoning_effort_reaches_the_template(front: FrontUnderTest) -> None:
    assert parse_request(ChatRequest, HI).template_names() == {}
    none = {**HI, "reasoning_effort": "none"}
    assert parse_request(ChatRequest, none).template_names() == {"reasoning_effort": "none", "enable_thinking": False}
    both = {**none, "chat_template_kwargs": {"enable_thinking": True, "a": 1}}
    assert parse_request(ChatRequest, both).template_names() == {
        "reasoning_effort": "none",
        "enable_thinking": True,
        "a": 1,
    }
    low = {**HI, "reasoning_effort": "low"}
    assert parse_request(ChatRequest, low).template_names() == {"reasoning_effort": "low"}
    text = front.do(lambda: front.service.text)
    assert text is not None
    thinker = ChatTemplate("{% if enable_thinking is defined %}no thoughts{% endif %}", {})
    front.do(lambda: setattr(front.service, "text", replace(text, template=thinker)))
    try:
        assert front.chat(reasoning_effort="none").status_code == 200
    finally:
        front.do(lambda: setattr(front.service, "text", text))
    assert front.do(lambda: front.core.submits[0]).prompt_ids == tuple(b"no thoughts")


@pytest.mark.parametrize("fields", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": [""]}], ids=str)
def test_no_prompt_is_the_beginning_of_a_document(front: FrontUnderTest, fields: dict[str, Any]) -> None:
    response = front.http.post("/v1/completions", json={"model": MODEL, **fields})
    assert response.status_code == 200
    # This tokenizer adds no token to a text, and it has no <|endoftext|>. So the prompt is the token for the beginning
    # of a text.
    assert front.do(lambda: front.core.submits[0]).prompt_ids == (256,)


def test_an_empty_prompt_without_special_tokens_stays_empty(front: FrontUnderTest) -> None:
    response = front.complete("", add_special_tokens=False)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "my-role", "content": "x"}], b"my-role\nx\n"),
        ([{"role": "function", "name": "f", "content": None}], b"function\n\n"),
        ([{"role": "tool", "tool_call_id": "1", "content": "5"}], b"tool\n5\n"),
        ([{"role": "assistant", "content": None, "refusal": "No."}], b"assistant\nNo.\n"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], b"assistant\nNo.\n"),
    ],
    ids=["custom", "function", "tool", "refusal", "refusal part"],
)
def test_the_template_decides_about_roles(front: FrontUnderTest, messages: list[Any], expected: bytes) -> None:
    assert front.chat(messages=messages, add_generation_prompt=False).status_code == 200
    submit = front.do(lambda: front.core.submits[0])
    assert bytes(token for token in submit.prompt_ids if token < 256) == expected


def test_a_request_for_no_tokens_scores_the_prompt(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "script", say("cd")))
    document = front.complete("ab", max_tokens=0, logprobs=1, echo=True).json()
    choice = document["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert document["usage"]["completion_tokens"] == 0
    assert document["usage"]["total_tokens"] == 2
    assert front.do(lambda: front.core.submits[0]).params.max_tokens == 1
    assert front.complete("ab", max_tokens=0, prompt_logprobs=0).json()["choices"][0]["text"] == ""
    refused = front.chat(max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_the_newer_name_of_max_tokens_counts_everywhere(front: FrontUnderTest) -> None:
    both = {"max_tokens": 9, "max_completion_tokens": 2}
    assert front.chat(**both).json()["usage"]["completion_tokens"] == 2
    assert front.complete("x", **both).json()["usage"]["completion_tokens"] == 2
    refused = front.complete("x", max_completion_tokens=-1).json()["error"]
    assert refused["param"] == "max_completion_tokens"
    assert refused["message"] == "max_completion_tokens must be from 0 to 2147483647, given -1"


def test_two_numbers_of_alternatives_for_one_prompt_are_refused(front: FrontUnderTest) -> None:
    refused = front.complete("ab", echo=True, logprobs=1, prompt_logprobs=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert front.complete("ab", echo=True, logprobs=1, prompt_logprobs=1).status_code == 200


def test_several_bad_biases_are_named_together() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(CompletionRequest, {"logit_bias": {"a": 1, "b": 1, "7": 1, "-1": 1}}).sampling()
    assert str(caught.value) == 'logit_bias must have token ids as keys, given "a", "b", "-1"'


def test_biases_of_tokens_that_do_not_exist_are_named_together(front: FrontUnderTest) -> None:
    message = front.chat(logit_bias={str(token_id): 1 for token_id in range(256, 266)}).json()["error"]["message"]
    assert "258, 259, 260, 261, 262 and 3 more" in message


def test_the_requests_id_is_the_answers(front: FrontUnderTest) -> None:
    response = front.chat(request_id="my-id-1")
    assert response.json()["id"] == "chatcmpl-my-id-1"
    assert response.headers["x-request-id"] == "my-id-1"
    assert front.complete("x", request_id="my/id 2".replace(" ", "_")).json()["id"] == "cmpl-my/id_2"
    with front.chat_stream(request_id="my-id-3") as stream:
        assert {event["id"] for event in stream if event != "[DONE]"} == {"chatcmpl-my-id-3"}


def test_without_one_the_header_is_the_id_and_else_both_are_fresh(front: FrontUnderTest) -> None:
    body = {"model": MODEL, **HI}
    headers = {"X-Request-Id": "from-a-proxy"}
    response = front.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (response.json()["id"], response.headers["x-request-id"]) == ("chatcmpl-from-a-proxy", "from-a-proxy")
    response = front.http.post("/v1/chat/completions", json={**body, "request_id": "mine"}, headers=headers)
    assert (response.json()["id"], response.headers["x-request-id"]) == ("chatcmpl-mine", "from-a-proxy")
    response = front.chat()
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "a\n", "\u00e9", 5])
def test_an_id_that_is_none_is_refused(front: FrontUnderTest, value: object) -> None:
    response = front.chat(request_id=value)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


def test_two_requests_with_one_id_are_two_in_the_engine(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.chat_stream(request_id="same") as first, front.chat_stream(request_id="same", n=2) as second:
        front.wait_until(lambda: len(front.core.submits) == 3, "both were submitted")
        front.do(front.core.release)
        assert list(first)[-1] == list(second)[-1] == "[DONE]"
    assert len({submit.sequence_id for submit in front.do(lambda: list(front.core.submits))}) == 3


def test_the_model_card_names_the_source_of_the_tokenizer() -> None:
    assert [model_root(model) for model in ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "file:///m/a", "/m/a")] == [
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-0.6B",
        "/m/a",
        "/m/a",
    ]
    assert model_root("builtin://smollm2-135m") == "smollm2-135m"
