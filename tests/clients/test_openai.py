"""The official `openai` client: chats, tools, structured output and Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    ASK_TWO_TOOLS,
    COPIED_CALL,
    COPY_CALL,
    DESCRIBE,
    LARGE_BYTES,
    MODEL,
    QUESTION,
    REASONING,
    REASONING_TOKENS,
    THINK,
    TOOLS,
    TWO_CALLS,
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


def joined_calls(stream: Any) -> list[tuple[str, str]]:
    """Returns name and arguments of each call in the deltas of a stream."""
    calls: dict[int, tuple[str, str]] = {}
    for chunk in stream:
        for piece in chunk.choices[0].delta.tool_calls or ():
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (name + (piece.function.name or ""), arguments + (piece.function.arguments or ""))
    return [calls[index] for index in sorted(calls)]


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
def test_a_call_that_the_model_makes_by_itself_whole_and_streamed(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": COPY_CALL}]
    answer = chat(client, ask, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [COPIED_CALL]
    assert joined_calls(chat(client, ask, tools=TOOLS, stream=True)) == calls


@pytest.mark.feature("tools")
def test_without_parallel_calls_there_is_one(client: openai.OpenAI) -> None:
    answer = chat(client, CALL, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_streamed_call_is_the_whole_one(client: openai.OpenAI, choice: Any) -> None:
    whole = chat(client, CALL, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
    streamed = joined_calls(chat(client, CALL, tools=TOOLS, tool_choice=choice, stream=True))
    assert streamed == [(call.function.name, call.function.arguments) for call in whole]


@pytest.mark.feature("parallel tools")
def test_two_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}
    ask = [{"role": "user", "content": ASK_TWO_TOOLS}]
    calls = chat(client, ask, **fields).choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == TWO_CALLS
    assert len({call.id for call in calls}) == 2
    streamed = joined_calls(chat(client, ask, **fields, stream=True))
    assert streamed == [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.feature("tools")
def test_the_result_of_a_tool_is_answered(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    messages = [
        *CALL,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."},
    ]
    assert chat(client, messages, tools=TOOLS).choices[0].message.content


@pytest.mark.feature("reasoning")
def test_the_reasoning_of_a_chat_is_apart_from_its_content(client: openai.OpenAI) -> None:
    thinks = {"chat_template_kwargs": THINK}
    completion = chat(client, ASK, extra_body=thinks)
    message = completion.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == (REASONING, REASONING, ANSWER)
    assert completion.usage.completion_tokens_details.reasoning_tokens == REASONING_TOKENS
    deltas = [chunk.choices[0].delta for chunk in chat(client, ASK, extra_body=thinks, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == REASONING
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


@pytest.mark.feature("reasoning")
def test_a_shape_begins_after_the_reasoning(client: openai.OpenAI) -> None:
    fields = {"chat_template_kwargs": THINK, "structured_outputs": {"choice": ["Paris", "Rome"]}}
    message = chat(client, ASK, extra_body=fields).choices[0].message
    assert (message.reasoning_content, message.content) == (REASONING, "Paris")


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


@pytest.mark.feature("parallel tools")
def test_a_response_makes_two_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"tools": RESPONSE_TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "temperature": 0}
    response = client.responses.create(model=MODEL, input=ASK_TWO_TOOLS, **fields)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == TWO_CALLS
    stream = client.responses.create(model=MODEL, input=ASK_TWO_TOOLS, **fields, stream=True)
    ends = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in ends] == [call.arguments for call in calls]


@pytest.mark.feature("reasoning")
def test_the_reasoning_of_a_response_is_an_item(client: openai.OpenAI) -> None:
    fields: Any = {"reasoning": {"effort": "low"}, "extra_body": {"chat_template_kwargs": THINK}, "temperature": 0}
    response = client.responses.create(model=MODEL, input=QUESTION, **fields)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == REASONING
    assert response.output_text == ANSWER
    assert response.usage.output_tokens_details.reasoning_tokens == REASONING_TOKENS
    events = list(client.responses.create(model=MODEL, input=QUESTION, **fields, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == REASONING
    assert events[-1].response.output_text == ANSWER
