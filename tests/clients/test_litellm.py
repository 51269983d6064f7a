"""LiteLLM: text, tools, reasoning and structured output on chats and on Responses, with its provider hosted_vllm.

Requests for Messages use LiteLLM's provider anthropic.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    ASK_TWO_TOOLS,
    COPIED_CALL,
    COPY_CALL,
    DESCRIBE,
    MODEL,
    PARAMETERS,
    QUESTION,
    REASONING,
    THINK,
    TOOLS,
    TWO_CALLS,
    Folder,
    Large,
    Person,
    check_call,
)
from pydantic import BaseModel


def complete(base_url: str, question: str, **fields: Any) -> Any:
    return litellm.completion(
        model=f"hosted_vllm/{MODEL}",
        api_base=base_url,
        api_key="none",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=300,
        timeout=120,
        num_retries=0,
        **fields,
    )


@pytest.mark.feature("chat")
def test_completion(base_url: str) -> None:
    assert complete(base_url, QUESTION).choices[0].message.content == ANSWER


@pytest.mark.feature("streaming")
def test_stream(base_url: str) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in complete(base_url, QUESTION, stream=True)]
    assert "".join(pieces) == ANSWER


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}, "auto"])
def test_tools(base_url: str, choice: Any) -> None:
    calls = complete(base_url, ASK_TOOL, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls or []
    assert calls or choice == "auto"
    for call in calls:
        check_call(call.function.name, call.function.arguments)


@pytest.mark.feature("tools")
def test_a_streamed_call_is_the_whole_one(base_url: str) -> None:
    chunks = list(complete(base_url, ASK_TOOL, tools=TOOLS, tool_choice="required", stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    whole = complete(base_url, ASK_TOOL, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in built] == [
        (call.function.name, call.function.arguments) for call in whole
    ]


@pytest.mark.feature("tools")
def test_a_call_that_the_model_makes_by_itself(base_url: str) -> None:
    whole = complete(base_url, COPY_CALL, tools=TOOLS, tool_choice="auto")
    built = litellm.stream_chunk_builder(
        list(complete(base_url, COPY_CALL, tools=TOOLS, tool_choice="auto", stream=True))
    )
    for answer in (whole, built):
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [COPIED_CALL]


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_response_format(base_url: str, shape: type[BaseModel]) -> None:
    text = complete(base_url, DESCRIBE, response_format=shape).choices[0].message.content
    assert isinstance(shape.model_validate_json(text), shape)


@pytest.mark.feature("parallel tools")
def test_two_calls_whole_and_streamed(base_url: str) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}
    whole = complete(base_url, ASK_TWO_TOOLS, **fields)
    built = litellm.stream_chunk_builder(list(complete(base_url, ASK_TWO_TOOLS, **fields, stream=True)))
    for answer in (whole, built):
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == TWO_CALLS


@pytest.mark.feature("reasoning")
def test_the_reasoning_is_apart_from_the_content(base_url: str) -> None:
    message = complete(base_url, QUESTION, extra_body={"chat_template_kwargs": THINK}).choices[0].message
    assert (message.reasoning_content, message.content) == (REASONING, ANSWER)
    stream = complete(base_url, QUESTION, extra_body={"chat_template_kwargs": THINK}, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == REASONING
    assert "".join(delta.content or "" for delta in deltas) == ANSWER


@pytest.mark.feature("responses")
def test_responses(base_url: str) -> None:
    fields: Any = {"model": f"hosted_vllm/{MODEL}", "api_base": base_url, "api_key": "none", "temperature": 0}
    response = litellm.responses(**fields, input=QUESTION)
    assert response.output[-1].content[0].text == ANSWER
    events = list(litellm.responses(**fields, input=QUESTION, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    called = litellm.responses(**fields, input=ASK_TWO_TOOLS, tools=tools, tool_choice="required")
    calls = [item for item in called.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == TWO_CALLS


@pytest.mark.feature("messages")
def test_messages(server_url: str) -> None:
    fields: Any = {
        "model": f"anthropic/{MODEL}",
        "api_base": server_url,
        "api_key": "none",
        "max_tokens": 64,
        "temperature": 0,
        "timeout": 120,
        "num_retries": 0,
    }

    def ask(question: str, **more: Any) -> Any:
        return litellm.completion(messages=[{"role": "user", "content": question}], **fields, **more)

    assert ask(QUESTION).choices[0].message.content == ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(QUESTION, stream=True)) == ANSWER
    whole = ask(ASK_TWO_TOOLS, tools=TOOLS, tool_choice="required")
    built = litellm.stream_chunk_builder(list(ask(ASK_TWO_TOOLS, tools=TOOLS, tool_choice="required", stream=True)))
    for answer in (whole, built):
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == TWO_CALLS


@pytest.mark.feature("messages")
def test_messages_in_their_own_form(server_url: str) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in PARAMETERS.items()]
    asked = litellm.anthropic.messages.acreate(  # LiteLLM has no synchronous form that works
        model=f"anthropic/{MODEL}",
        api_base=server_url,
        api_key="none",
        max_tokens=64,
        temperature=0.0,
        messages=[{"role": "user", "content": ASK_TWO_TOOLS}],
        tools=tools,
        tool_choice={"type": "any"},
    )
    message: Any = asyncio.run(asked)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert [(call["name"], call["input"]) for call in calls] == TWO_CALLS
