"""Any JSON value in place of any value of a Responses or Messages request is used or refused, and causes no crash."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.errors import RequestError
from rayloom_engine.front.anthropic.request import MessagesRequest
from rayloom_engine.front.anthropic.translation import translate as translate_messages
from rayloom_engine.front.openai.chat.translated import TranslatedChat
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.responses.request import ResponsesRequest
from rayloom_engine.front.responses.translation import translate as translate_responses

TEXT = {"type": "text", "text": "a"}
SCHEMA = {"type": "object", "properties": {}}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ],
    "instructions": "a",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 5,
    "stop": ["a"],
}
MESSAGES = {
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "max_tokens": 2000,
    "stop_sequences": ["a"],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths(value: Any) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, child in children for path in ((key,), *((key, *rest) for rest in paths(child)))]


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def prepare(translated: TranslatedChat) -> None:
    with translated.own_names():
        chat = translated.request()
        chat.sampling()
        chat.tool_use()


def test_the_bodies_are_translated_as_they_are() -> None:
    prepare(translate_responses(parse_request(ResponsesRequest, RESPONSES)))
    prepare(translate_messages(parse_request(MessagesRequest, MESSAGES)))


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(paths(RESPONSES)), value=JSON)
def test_responses(path: tuple[Any, ...], value: Any) -> None:
    with contextlib.suppress(RequestError):
        prepare(translate_responses(parse_request(ResponsesRequest, replaced(RESPONSES, path, value))))


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(paths(MESSAGES)), value=JSON)
def test_messages(path: tuple[Any, ...], value: Any) -> None:
    with contextlib.suppress(RequestError):
        prepare(translate_messages(parse_request(MessagesRequest, replaced(MESSAGES, path, value))))
