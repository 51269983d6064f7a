"""/v1/responses over HTTP against a fake core: items, streams checked event by event, errors, recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rayloom_engine.front.operations.service import Waits
from rt_front import FrontUnderTest, running_front
from rt_response_events import item_text, read_responses_stream, sse_events, types
from rt_tools import says

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
# Text of the answer -> the kinds and texts of its items.
ANSWERS = {
    "Hello there.": [("message", "Hello there.")],
    "<think>Hm.</think>Yes.": [("reasoning", "Hm."), ("message", "Yes.")],
    CALL: [("function_call", '{"city": "Paris"}')],
    f"<think>Hm.</think>I look.{CALL}{CALL}": [
        ("reasoning", "Hm."),
        ("message", "I look."),
        ("function_call", '{"city": "Paris"}'),
        ("function_call", '{"city": "Paris"}'),
    ],
    "": [("message", "")],
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    waits = Waits(ping_s=0.05, accept_s=0.05)
    folder = tmp_path_factory.mktemp("front")
    with running_front(
        folder, waits=waits, reasoning_parser="qwen3", max_model_len=4096, max_queued_requests=4
    ) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    running.do(running.core.reset)
    return running


def post(front: FrontUnderTest, **fields: Any) -> httpx.Response:
    return front.http.post("/v1/responses", json={"input": "Hi", **fields})


def kinds_and_texts(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["type"], item_text(item)) for item in response["output"]]


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """A response without ids and times."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    dropped = ("id", "created_at", "completed_at")
    return {**{name: value for name, value in response.items() if name not in dropped}, "output": output}


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("tokens_per_output", [1, 7, 1000])
def test_a_stream_has_the_items_of_the_whole_answer(front: FrontUnderTest, text: str, tokens_per_output: int) -> None:
    says(front, text, tokens_per_output)
    fields = {"tools": [TOOL], **LOGPROBS}
    whole = post(front, **fields).json()
    types.Response.model_validate(whole)
    assert kinds_and_texts(whole) == ANSWERS[text]
    streamed = read_responses_stream(post(front, stream=True, **fields))
    if tokens_per_output == 1 and "<" not in text:  # a tool call's tokens have no place in the text's logprobs
        assert without_names(streamed.final) == without_names(whole)
    assert kinds_and_texts(streamed.final) == kinds_and_texts(whole)
    assert streamed.final["usage"] == whole["usage"]
    for item in streamed.items:
        assert len(item.logprobs) >= (1 if item.kind == "message" and item.text else 0)


def test_the_answer_states_the_request_and_its_usage(front: FrontUnderTest) -> None:
    given = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "max_output_tokens": 50,
        "store": True,
        "user": "u",
        "tools": [TOOL],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    says(front, "<think>Hm.</think>Yes.")
    response = post(front, **given)
    document = response.json()
    assert {name: document[name] for name in given} == {**given, "store": False}
    assert document["id"] == f"resp_{response.headers['x-request-id']}"
    assert (document["status"], document["error"], document["incomplete_details"]) == ("completed", None, None)
    usage = document["usage"]
    assert usage["output_tokens"] == len("<think>Hm.</think>Yes.") + 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("<think>Hm.</think>")}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    num_in_blocks = usage["input_tokens"] // 16 * 16
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": num_in_blocks - 3}


def test_an_answer_that_reaches_its_limit_is_incomplete(front: FrontUnderTest) -> None:
    whole = post(front, max_output_tokens=3).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["status"], item_text(item)) for item in whole["output"]] == [("incomplete", "Hel")]
    streamed = read_responses_stream(post(front, max_output_tokens=3, stream=True))
    assert without_names(streamed.final) == without_names(whole)
    assert streamed.events[-1]["type"] == "response.incomplete"


def test_logprobs_are_those_of_the_text_without_reasoning(front: FrontUnderTest) -> None:
    says(front, "<think>Hm.</think>Yes.")
    whole = post(front, **LOGPROBS).json()["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in whole) == "Yes.<|im_end|>"
    assert whole[0]["top_logprobs"] == [{"token": "!", "logprob": -0.25, "bytes": [33]}]
    streamed = read_responses_stream(post(front, stream=True, **LOGPROBS))
    assert streamed.final["output"][1]["content"][0]["logprobs"] == whole
    assert streamed.items[1].logprobs == whole[:-1]  # the last token has no text


@pytest.mark.parametrize("text", ["\n\nHello.", "<b>Hello."])
def test_a_stream_has_the_logprobs_of_a_beginning_that_might_have_been_reasoning(
    front: FrontUnderTest, text: str
) -> None:
    says(front, text)
    whole = post(front, **LOGPROBS).json()["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in whole) == f"{text}<|im_end|>"
    streamed = read_responses_stream(post(front, stream=True, **LOGPROBS))
    assert streamed.final["output"][0]["content"][0]["logprobs"] == whole


def test_the_response_states_what_of_a_lenient_form_is_not_enforced(front: FrontUnderTest) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "array", "uniqueItems": True}}
    strict = post(front, text={"format": {**form, "strict": True}})
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "text.format.schema")
    lenient = post(front, text={"format": {**form, "strict": False}})
    assert "uniqueItems" in lenient.json()["warnings"][0]
    assert "warnings" not in post(front).json()


def test_items_of_an_earlier_turn_are_in_the_prompt(front: FrontUnderTest) -> None:
    says(front, CALL)
    first = post(front, tools=[TOOL]).json()["output"]
    call_id = first[0]["call_id"]
    output = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    post(front, tools=[TOOL], input=[{"role": "user", "content": "Hi"}, *first, output])
    submit = front.do(lambda: front.core.submits[-1])
    prompt = bytes(token for token in submit.prompt_ids if token < 256).decode()
    assert '"city": "Paris"' in prompt and "sunny" in prompt


def test_raw_messages_are_returned_when_requested(front: FrontUnderTest) -> None:
    document = post(front, enable_response_messages=True).json()
    message = document["input_messages"][0]
    assert message["type"] == "raw_message_tokens"
    assert message["message"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert message["tokens"][0] == 256
    assert document["output_messages"][0]["message"] == "Hello there.<|im_end|>"


def test_the_stream_begins_before_the_first_token_and_comments_keep_it_alive(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 0))
    lines = []
    body = {"input": "Hi", "stream": True}
    with front.http.stream("POST", "/v1/responses", json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
            if line == ": ping":
                front.do(front.core.release)
    assert lines[0] == "event: response.created"
    assert ": ping" in lines
    assert lines.index(": ping") < lines.index("event: response.output_item.added")
    assert "event: response.completed" in lines
    assert "data: [DONE]" not in lines


def test_an_error_in_the_middle_is_a_failed_response_and_an_error_event(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    num_failed = front.do(lambda: front.service.metrics.failed.value())
    body = b""
    with front.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        for piece in response.iter_bytes():
            body += piece
            if b"output_text.delta" in piece:
                front.do(lambda: front.core.refuse(front.core.submits[0].sequence_id, "poison", "it kills ranks"))
    *_, failed, error = sse_events(body)
    types.ResponseFailedEvent.model_validate(failed)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert "Hello".startswith(item_text(failed["response"]["output"][0]))
    types.ResponseErrorEvent.model_validate(error)
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", "poisonous_request", "poisonous_request")
    assert error["sequence_number"] == failed["sequence_number"] + 1
    assert front.do(lambda: front.service.metrics.failed.value()) == num_failed + 1


def test_a_full_queue_is_an_error_before_the_stream(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "refusal", ("queue_full", "full")))
    response = post(front, stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"] == "7"


def test_a_core_that_dies_costs_a_pause_and_no_event(front: FrontUnderTest) -> None:
    says(front, f"<think>Hm.</think>I look.{CALL}")
    undisturbed = read_responses_stream(post(front, stream=True, tools=[TOOL]))
    front.do(lambda: setattr(front.core, "hold_after", 25))
    body = b""
    is_dead = False
    with front.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True, "tools": [TOOL]}) as response:
        for piece in response.iter_bytes():
            body += piece
            if b": ping" in piece and not is_dead:
                is_dead = True
                front.do(front.core.die)
                front.do(front.core.release)
    headers = {"content-type": response.headers["content-type"]}
    recovered = read_responses_stream(httpx.Response(200, headers=headers, content=body))
    assert without_names(recovered.final) == without_names(undisturbed.final)
    submits = front.do(lambda: list(front.core.submits))
    assert submits[-1].generated_ids != (), "the sequence was submitted again with its tokens"


def test_a_client_that_leaves_ends_its_sequence(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 5))
    with front.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        next(response.iter_lines())
    front.wait_until(lambda: len(front.core.aborts) == 1, "the sequence is aborted")
