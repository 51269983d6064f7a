"""LiteLLM with its provider hosted_vllm: chats, tools, structured output."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from client_shapes import ANSWER, ASK_TOOL, DESCRIBE, MODEL, QUESTION, TOOLS, Folder, Large, Person, check_call
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


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_response_format(base_url: str, shape: type[BaseModel]) -> None:
    text = complete(base_url, DESCRIBE, response_format=shape).choices[0].message.content
    assert isinstance(shape.model_validate_json(text), shape)
