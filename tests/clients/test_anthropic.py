"""The official `anthropic` client: Messages, streams, tools, structured output and the count of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
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
    REASONING_TOKENS,
    TWO_CALLS,
    Folder,
    Large,
    Person,
    check_call,
)
from pydantic import BaseModel

TOOLS = [{"name": name, "description": name, "input_schema": schema} for name, schema in PARAMETERS.items()]


@pytest.fixture(scope="module")
def client(server_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server_url, api_key="none", max_retries=0, timeout=120.0) as made:
        yield made


def fields(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "max_tokens": 64, "messages": messages, "extra_body": {"temperature": 0}, **more}


@pytest.mark.feature("messages")
def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields(QUESTION))
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn"
    # `input_tokens` leaves out prompt tokens that were read from the cache or written into it.
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == 42
    assert usage.output_tokens == 8


@pytest.mark.feature("messages")
def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**fields(QUESTION)) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().content[0].text == ANSWER


@pytest.mark.feature("messages")
def test_a_system_prompt(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**fields(QUESTION, system="Be brief.")).content[0].text


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}], ids=["any", "named"])
def test_a_forced_call_whole_and_streamed(client: anthropic.Anthropic, choice: Any) -> None:
    asked = fields(ASK_TOOL, tools=TOOLS, tool_choice=choice)
    message = client.messages.create(**asked)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert calls and message.stop_reason == "tool_use"
    for call in calls:
        check_call(call.name, call.input)
    with client.messages.stream(**asked) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in streamed] == [(call.name, call.input) for call in calls]


@pytest.mark.feature("tools")
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_call_that_the_model_may_or_may_not_make(client: anthropic.Anthropic, choice: str) -> None:
    asked = fields(COPY_CALL, tools=TOOLS, tool_choice={"type": choice})
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        assert calls == ([COPIED_CALL] if choice == "auto" else [])


@pytest.mark.feature("structured output")
@pytest.mark.parametrize("shape", [Person, Folder, Large])
def test_parse(client: anthropic.Anthropic, shape: type[BaseModel]) -> None:
    message = client.messages.parse(**fields(DESCRIBE, max_tokens=400), output_format=shape)
    assert isinstance(message.parsed_output, shape)


@pytest.mark.feature("parallel tools")
def test_two_calls_whole_and_streamed(client: anthropic.Anthropic) -> None:
    asked = fields(ASK_TWO_TOOLS, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": False})
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == TWO_CALLS


@pytest.mark.feature("reasoning")
def test_the_reasoning_is_a_block_of_thinking(client: anthropic.Anthropic) -> None:
    asked = fields(QUESTION, max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024})
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "content_block_delta"]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", REASONING, "text", ANSWER)
    assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == REASONING
    assert whole.usage.output_tokens_details.thinking_tokens == REASONING_TOKENS


@pytest.mark.feature("tools")
def test_the_result_of_a_tool_is_answered(client: anthropic.Anthropic) -> None:
    asked = fields(ASK_TOOL, tools=TOOLS)
    call = {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {"zone": "UTC"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is noon."}
    asked["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked).content


@pytest.mark.feature("messages")
def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": QUESTION}])
    assert counted.input_tokens == 42
