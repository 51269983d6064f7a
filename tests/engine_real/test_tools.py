"""Tools with the embedded model, which was not trained for them: only grammars make its calls valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from rt_lazy import LazyModule
from rt_server import RunningServer

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the weather in Paris, and the time in Rome?"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "kelvin"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "get_time": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="key-for-tests", max_retries=0, timeout=120.0) as made:
        yield made


def streamed(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Content, calls as id, name and arguments, and the finish reason of a stream."""
    content = finish_reason = ""
    calls: list[list[str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append([call.id, call.function.name, ""])
                else:
                    assert (call.id, call.function.name) == (None, None)
                calls[call.index][2] += call.function.arguments
    return content, calls, finish_reason


def test_a_function_of_the_older_form_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    functions = [tool["function"] for tool in TOOLS]
    asked: Any = {"functions": functions, "function_call": {"name": "get_time"}, "max_tokens": 60, "temperature": 0}
    call = client.chat.completions.create(model=MODEL, messages=QUESTION, **asked).choices[0].message.function_call
    assert call is not None
    assert call.name == "get_time"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS["get_time"])


@pytest.mark.parametrize(
    ("tool_choice", "expected"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_forced_calls_are_valid_and_a_stream_has_the_same(
    client: openai.OpenAI, tool_choice: Any, expected: str, seed: int
) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "seed": seed,
        "max_tokens": 120,
        "extra_headers": {"X-Request-Id": f"forced-{seed}"},
    }
    choice = client.chat.completions.create(**settings).choices[0]
    assert choice.finish_reason == expected
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    if tool_choice is NAMED:
        assert call.function.name == "get_time"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    content, calls, finish_reason = streamed(list(client.chat.completions.create(**settings, stream=True)))
    assert (content, finish_reason) == ("", expected)
    assert calls == [[call.id, call.function.name, call.function.arguments]]


def test_results_of_tools_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "It is five past seven."},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    bare = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, max_tokens=1)
    assert bare.usage is not None
    assert answer.usage.prompt_tokens > bare.usage.prompt_tokens + 30
