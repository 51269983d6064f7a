"""LangChain's ChatOpenAI: chats, bound tools, structured output, and the same on Responses."""

from __future__ import annotations

from typing import Any

import pytest
from client_shapes import (
    ANSWER,
    ASK_TOOL,
    ASK_TWO_TOOLS,
    COPIED_CALL,
    COPY_CALL,
    DESCRIBE,
    MODEL,
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
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def made(base_url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=base_url,
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=300,
        timeout=120,
        max_retries=0,
        **fields,
    )


@pytest.mark.feature("chat")
def test_invoke(base_url: str) -> None:
    assert made(base_url).invoke(QUESTION).content == ANSWER


@pytest.mark.feature("streaming")
def test_stream(base_url: str) -> None:
    assert "".join(chunk.content for chunk in made(base_url).stream(QUESTION)) == ANSWER


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["any", "time", "auto"])
def test_bound_tools(base_url: str, choice: str) -> None:
    bound = made(base_url).bind_tools(TOOLS, tool_choice=choice)
    message = bound.invoke(ASK_TOOL)
    assert message.tool_calls or choice == "auto"
    for call in message.tool_calls:
        assert call["name"] == "time" or choice != "time"
        check_call(call["name"], call["args"])


@pytest.mark.feature("tools")
def test_streamed_tool_calls(base_url: str) -> None:
    bound = made(base_url).bind_tools(TOOLS, tool_choice="any")
    whole, *others = list(bound.stream(ASK_TOOL))
    for chunk in others:
        whole += chunk
    expected = bound.invoke(ASK_TOOL).tool_calls
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        (call["name"], call["args"]) for call in expected
    ]


@pytest.mark.feature("tools")
@pytest.mark.parametrize("uses_responses", [False, True], ids=["chat", "responses"])
def test_a_call_that_the_model_makes_by_itself(base_url: str, uses_responses: bool) -> None:
    bound = made(base_url, use_responses_api=uses_responses).bind_tools(TOOLS, tool_choice="auto")
    joined, *others = list(bound.stream(COPY_CALL))
    for chunk in others:
        joined += chunk
    for message in (bound.invoke(COPY_CALL), joined):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [COPIED_CALL]


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_json_schema(base_url: str, shape: type[BaseModel]) -> None:
    assert isinstance(made(base_url).with_structured_output(shape, method="json_schema").invoke(DESCRIBE), shape)


@pytest.mark.feature("structured output")
def test_function_calling(base_url: str) -> None:
    asked = made(base_url).with_structured_output(Person, method="function_calling", strict=True)
    assert isinstance(asked.invoke(DESCRIBE), Person)


@pytest.mark.feature("responses")
def test_responses(base_url: str) -> None:
    model = made(base_url, use_responses_api=True)
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER


@pytest.mark.feature("parallel tools")
@pytest.mark.parametrize("uses_responses", [False, True], ids=["chat", "responses"])
def test_two_calls_whole_and_streamed(base_url: str, uses_responses: bool) -> None:
    model = made(base_url, use_responses_api=uses_responses)
    bound = model.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=True)
    whole = bound.invoke(ASK_TWO_TOOLS)
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == TWO_CALLS
    joined, *others = list(bound.stream(ASK_TWO_TOOLS))
    for chunk in others:
        joined += chunk
    assert [(call["name"], call["args"]) for call in joined.tool_calls] == TWO_CALLS


@pytest.mark.feature("reasoning")
def test_the_reasoning_of_a_response_is_a_block(base_url: str) -> None:
    model = made(base_url, use_responses_api=True, extra_body={"chat_template_kwargs": THINK})
    message = model.invoke(QUESTION)
    assert [block["type"] for block in message.content] == ["reasoning", "text"]
    assert message.content[0]["content"][0]["text"] == REASONING
    assert message.text == ANSWER
