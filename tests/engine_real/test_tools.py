"""Tools with the embedded model, which was not trained for tools: only grammars make its calls valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from rayloom_engine.front.openai.chat.message import message_deltas, message_document
from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.parser import ParserSettings, TextParser
from rayloom_engine.text.message_parsing.sink import CallRules
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, TOOL_FORMATS
from rayloom_engine.text.message_parts import MessagePart
from rayloom_engine.text.tools.call_grammar import call_grammar
from rayloom_engine.text.tools.tool import Tool, ToolUse
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
KEY = {"Authorization": "Bearer key-for-tests"}
NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api_url}/v1", api_key="key-for-tests", max_retries=0, timeout=120.0) as made:
        yield made


def streamed(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Content, calls (each as id, name and arguments), and finish reason of a stream."""
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


def joined(deltas: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of a stream's deltas, joined by the rules of OpenAI's API."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls


@pytest.fixture(scope="module")
def written_calls(server: RunningServer) -> dict[str, dict[str, Any]]:
    """Format of tool calls -> a choice with calls in this format, which a grammar has forced.

    A server has only one format, so the grammars are sent with completions. All completions run together.
    """
    tools = tuple(Tool(name=name, parameters=schema, document={}) for name, schema in SCHEMAS.items())
    use = ToolUse(tools=tools, mode="required", callable=tools, is_parallel=True)
    # In harmony format the model may reason first. The banned word "analysis" would begin the reasoning, so the model
    # calls a tool at once.
    fixed = {"prompt": "The weather in Paris: ", "seed": 3, "max_tokens": 64, "logprobs": 0, "bad_words": ["analysis"]}

    def write(name: str) -> dict[str, Any]:
        body = {**fixed, "structured_outputs": {"grammar": call_grammar(use, TOOL_FORMATS[name], {})}}
        answer = httpx.post(f"{server.api_url}/v1/completions", json=body, headers=KEY, timeout=120.0)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(len(TOOL_FORMATS)) as pool:
        return dict(zip(TOOL_FORMATS, pool.map(write, TOOL_FORMATS), strict=True))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_that_the_model_writes_reassemble_from_the_deltas_of_its_tokens(
    written_calls: dict[str, dict[str, Any]], name: str
) -> None:
    choice = written_calls[name]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    starts = [offset - offsets[0] for offset in offsets]
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text
    assert len(pieces) > 15

    def parts(pieces: list[str]) -> list[MessagePart]:
        rules = CallRules(schemas=SCHEMAS, call_id=lambda index: f"call-{index}")
        format = TOOL_FORMATS[name]
        parser = TextParser(ParserSettings(tools=format, is_harmony=format is HARMONY), rules)
        return [part for piece in pieces for part in parser.add(piece)] + parser.finish()

    message = Message()
    message.add(parts([text]))
    whole = message_document(message)
    # max_tokens may cut the last call off. A call whose name is incomplete becomes content.
    assert joined(message_deltas(parts(pieces))) == (whole["content"] or "", whole["tool_calls"])
    for call in whole["tool_calls"] if choice["finish_reason"] == "stop" else whole["tool_calls"][:-1]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
