"""The official `openai` client: chats, tools, structured output and Responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    DESCRIBE,
    LARGE_BYTES,
    MODEL,
    QUESTION,
    TOOLS,
    Folder,
    Large,
    Person,
    check_call,
)
from pydantic import BaseModel

ASK = [{"role": "user", "content": QUESTION}]
CALL = [{"role": "user", "content": ASK_TOOL}]
NAMED = {"type": "function", "function": {"name": "time"}}
RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120.0) as made:
        yield made


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=64, **fields)


@pytest.mark.feature("chat")
def test_chat(client: openai.OpenAI) -> None:
    assert chat(client, ASK).choices[0].message.content == ANSWER


@pytest.mark.feature("streaming")
def test_stream(client: openai.OpenAI) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, ASK, stream=True)]
    assert "".join(pieces) == ANSWER


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    answer = chat(client, CALL, tools=TOOLS, tool_choice=choice).choices[0]
    assert answer.finish_reason in ("tool_calls", "stop")
    names = [call.function.name for call in answer.message.tool_calls]
    assert names and (choice == "required" or names == ["time"])
    for call in answer.message.tool_calls:
        assert call.type == "function" and call.id
        check_call(call.function.name, call.function.arguments)


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_free_answer_is_text_or_a_call(client: openai.OpenAI, choice: Any) -> None:
    message = chat(client, CALL, tools=TOOLS, tool_choice=choice).choices[0].message
    assert message.content or message.tool_calls
    assert choice == "auto" or not message.tool_calls


@pytest.mark.feature("tools")
def test_without_parallel_calls_there_is_one(client: openai.OpenAI) -> None:
    answer = chat(client, CALL, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI, choice: Any) -> None:
    whole = chat(client, CALL, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
    calls: dict[int, list[str]] = {}
    for chunk in chat(client, CALL, tools=TOOLS, tool_choice=choice, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.function.name or ""
            call[1] += piece.function.arguments or ""
    assert [calls[index] for index in sorted(calls)] == [[c.function.name, c.function.arguments] for c in whole]


@pytest.mark.feature("tools")
def test_the_result_of_a_tool_is_answered(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        *CALL,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."},
    ]
    assert chat(client, messages, tools=TOOLS).choices[0].message.content


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_parse(client: openai.OpenAI, shape: type[BaseModel]) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": DESCRIBE}],
        response_format=shape,
        temperature=0,
        max_tokens=400,
    )
    assert isinstance(completion.choices[0].message.parsed, shape)
    assert LARGE_BYTES > 15_000


@pytest.mark.feature("structured output")
def test_a_streamed_shape_is_the_whole_one(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": DESCRIBE}], "response_format": Person}
    whole = client.chat.completions.parse(**fields, temperature=0).choices[0].message.parsed
    with client.chat.completions.stream(**fields, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole


@pytest.mark.feature("structured output")
def test_fields_of_vllm(client: openai.OpenAI) -> None:
    answer = chat(client, ASK, extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}})
    assert answer.choices[0].message.content in ("Paris", "Rome")


@pytest.mark.feature("responses")
def test_response(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64)
    assert response.status == "completed"
    assert response.output_text == ANSWER
    assert response.usage.output_tokens == 8


@pytest.mark.feature("responses")
def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64, stream=True)
    events = list(stream)
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER


@pytest.mark.feature("responses")
def test_a_response_calls_a_tool(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input=ASK_TOOL,
        tools=RESPONSE_TOOLS,
        tool_choice="required",
        temperature=0,
        max_output_tokens=64,
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check_call(call.name, call.arguments)


@pytest.mark.feature("responses")
def test_a_response_has_a_shape(client: openai.OpenAI) -> None:
    response = client.responses.parse(model=MODEL, input=DESCRIBE, text_format=Person, temperature=0)
    assert isinstance(response.output_parsed, Person)
