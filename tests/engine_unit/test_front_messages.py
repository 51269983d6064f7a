"""/v1/messages over HTTP against a fake core: blocks, streams checked event by event, errors in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayloom_engine.front.operations.service import Waits
from rt_front import FrontUnderTest, running_front
from rt_lazy import LazyModule
from rt_message_events import read_messages_stream, types
from rt_response_events import sse_events
from rt_tools import says

anthropic = LazyModule("anthropic")

HI = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}
# Text of the answer -> stop reason and blocks, without ids and signatures.
ANSWERS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "Hello there.": ("end_turn", [{"type": "text", "text": "Hello there.", "citations": None}]),
    "<think>Hm.</think>Yes.": (
        "end_turn",
        [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes.", "citations": None}],
    ),
    CALL: ("tool_use", [USE]),
    f"I look.{CALL}{CALL}": ("tool_use", [{"type": "text", "text": "I look.", "citations": None}, USE, USE]),
    "": ("end_turn", [{"type": "text", "text": "", "citations": None}]),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    waits = Waits(ping_s=0.05, accept_s=0.05)
    folder = tmp_path_factory.mktemp("front")
    with running_front(
        folder, waits=waits, api_keys=("secret-key",), reasoning_parser="qwen3", max_model_len=4096
    ) as front:
        front.http.headers["x-api-key"] = "secret-key"
        front.http.headers["anthropic-version"] = "2023-06-01"
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def post(front: FrontUnderTest, **fields: Any) -> httpx.Response:
    return front.http.post("/v1/messages", json={"messages": HI, "max_tokens": 300, **fields})


def plain_blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in message["content"]
    ]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
def test_a_stream_has_the_blocks_of_the_whole_answer(front: FrontUnderTest, text: str, tokens_per_output: int) -> None:
    says(front, text, tokens_per_output)
    whole = post(front, tools=[TOOL]).json()
    types.Message.model_validate(whole)
    assert (whole["stop_reason"], plain_blocks(whole)) == ANSWERS[text]
    streamed = read_messages_stream(post(front, tools=[TOOL], stream=True)).message
    assert (streamed["stop_reason"], plain_blocks(streamed)) == ANSWERS[text]
    assert streamed["usage"] == whole["usage"]
    assert [block.get("signature") for block in streamed["content"]] == [
        block.get("signature") for block in whole["content"]
    ]


def test_the_answer_states_id_model_and_usage(front: FrontUnderTest) -> None:
    says(front, "<think>Hm.</think>Yes.")
    response = post(front)
    document = response.json()
    assert document["id"] == f"msg_{response.headers['x-request-id']}"
    assert (document["type"], document["role"], document["model"]) == ("message", "assistant", "tiny")
    num_prompt = len("_user\nHi_\n_assistant\n")  # each _ stands for a special token
    assert document["usage"] == {
        "input_tokens": num_prompt - 16,
        "cache_creation_input_tokens": 13,
        "cache_read_input_tokens": 3,
        "output_tokens": len("<think>Hm.</think>Yes.") + 1,
        "output_tokens_details": {"thinking_tokens": len("<think>Hm.</think>")},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "stop"),
    [
        ("Hello there.", {"max_tokens": 3}, ("max_tokens", None)),
        ("Hello there.", {"stop_sequences": ["the", "lo"]}, ("stop_sequence", "lo")),
        (CALL, {"stop_sequences": ["</tool_call>"]}, ("tool_use", None)),
        (CALL, {"stop_sequences": ["ris"]}, ("stop_sequence", "ris")),
        (CALL, {"max_tokens": 65}, ("max_tokens", None)),
    ],
)
def test_stop_reasons(
    front: FrontUnderTest, text: str, fields: dict[str, Any], stop: tuple[str, str | None], stream: bool
) -> None:
    says(front, text)
    response = post(front, tools=[TOOL], stream=stream, **fields)
    if stream:
        events = sse_events(response.content)
        found = next(event["delta"] for event in events if event["type"] == "message_delta")
    else:
        found = response.json()
    assert (found["stop_reason"], found["stop_sequence"]) == stop


def test_a_call_that_is_cut_has_the_input_that_is_there(front: FrontUnderTest) -> None:
    says(front, CALL)
    cut = CALL.index(', "arg') + len(', "arguments": {"city": "Pa')
    block = post(front, tools=[TOOL], max_tokens=cut).json()["content"][0]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert block["input"] in ({}, {"city": "Pa"})


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_nested_too_deeply_are_no_whole_call(front: FrontUnderTest, stream: bool) -> None:
    says(front, CALL.replace('"Paris"', "[" * 1_500 + "]" * 1_500), 1_000)
    response = post(front, tools=[TOOL], stream=stream, max_tokens=3_500)
    assert response.status_code == 200
    if stream:
        assert sse_events(response.content)[-1]["type"] == "message_stop"
    else:
        assert response.json()["content"][0]["input"] == {}


def test_a_last_message_of_the_assistant_is_continued(front: FrontUnderTest) -> None:
    post(front, messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    submit = front.do(lambda: front.core.submits[-1])
    assert bytes(token for token in submit.prompt_ids if token < 256).endswith(b"assistant\nThe answer is (")


def test_tokens_are_counted_without_generating(front: FrontUnderTest) -> None:
    document = front.http.post("/v1/messages/count_tokens", json={"messages": HI, "model": "tiny"}).json()
    assert document == {"input_tokens": len("_user\nHi_\n_assistant\n")}
    assert front.do(lambda: front.core.submits) == []


def test_the_stream_begins_before_the_first_token_and_pings_are_events(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 0))
    body = b""
    request = {"messages": HI, "max_tokens": 30, "stream": True}
    with front.http.stream("POST", "/v1/messages", json=request) as response:
        for piece in response.iter_bytes():
            body += piece
            if b"event: ping" in piece:
                front.do(front.core.release)
    events = [event["type"] for event in sse_events(body)]
    assert events[:2] == ["message_start", "ping"]
    assert events[-1] == "message_stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", {"messages": HI}, 400, "invalid_request_error"),
        ("/v1/messages", {"messages": HI, "max_tokens": 3, "model": "claude"}, 404, "not_found_error"),
        ("/v1/messages/count_tokens", {"messages": []}, 400, "invalid_request_error"),
        ("/v1/messages/batches", {}, 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_form(
    front: FrontUnderTest, path: str, body: dict[str, Any], status: int, kind: str
) -> None:
    response = front.http.post(path, json=body)
    document = response.json()
    assert (response.status_code, document["type"], document["error"]["type"]) == (status, "error", kind)
    assert document["error"]["message"]


def test_a_wrong_key_and_a_full_queue_are_the_clients_own_errors(front: FrontUnderTest) -> None:
    def ask(key: str) -> None:
        with anthropic.Anthropic(base_url=front.api_url, api_key=key, max_retries=0) as client:
            client.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])

    with pytest.raises(anthropic.AuthenticationError) as wrong:
        ask("wrong")
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    front.do(lambda: setattr(front.core, "refusal", ("queue_full", "full")))
    with pytest.raises(anthropic.RateLimitError) as full:
        ask("secret-key")
    assert full.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]


def test_a_server_that_starts_answers_503_in_anthropics_form(tmp_path: Path) -> None:
    with running_front(tmp_path, ready=False) as front:
        response = post(front)
    assert response.status_code == 503
    assert (response.json()["type"], response.json()["error"]["type"]) == ("error", "overloaded_error")
    assert response.headers["retry-after"]


def test_an_error_in_the_middle_is_an_error_event(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    body = b""
    request = {"messages": HI, "max_tokens": 30, "stream": True}
    with front.http.stream("POST", "/v1/messages", json=request) as response:
        for piece in response.iter_bytes():
            body += piece
            if b"text_delta" in piece:
                front.do(lambda: front.core.refuse(front.core.submits[0].sequence_id, "poison", "it kills ranks"))
    last = sse_events(body)[-1]
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == ("error", "api_error", "poisonous_request")


def test_a_core_that_dies_costs_a_pause_and_no_event(front: FrontUnderTest) -> None:
    says(front, f"<think>Hm.</think>I look.{CALL}")
    undisturbed = read_messages_stream(post(front, stream=True, tools=[TOOL])).message
    front.do(lambda: setattr(front.core, "hold_after", 50))
    body = b""
    is_dead = False
    request = {"messages": HI, "max_tokens": 300, "stream": True, "tools": [TOOL]}
    with front.http.stream("POST", "/v1/messages", json=request) as response:
        for piece in response.iter_bytes():
            body += piece
            if b"event: ping" in piece and not is_dead:
                is_dead = True
                front.do(front.core.die)
                front.do(front.core.release)
    headers = {"content-type": response.headers["content-type"]}
    recovered = read_messages_stream(httpx.Response(200, headers=headers, content=body)).message
    assert plain_blocks(recovered) == plain_blocks(undisturbed)
    assert recovered["usage"]["output_tokens"] == undisturbed["usage"]["output_tokens"]
    submits = front.do(lambda: list(front.core.submits))
    assert submits[-1].generated_ids != (), "the sequence was submitted again with its tokens"


def test_arguments_are_streamed_as_the_model_writes_them(front: FrontUnderTest) -> None:
    says(front, CALL)
    events = read_messages_stream(post(front, stream=True, tools=[TOOL])).events
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == {"city": "Paris"}
