"""Tool calls in a request's messages, as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError

MAX_CALLS = 1024  # the most calls in one message


def plain_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the calls of an assistant's message, from `tool_calls` or its predecessor `function_call`.

    Arguments become an object, as in the templates' own examples. If a string is not the JSON of an object, it stays a
    string. Raises RequestError that names the field.
    """
    single = message.get("function_call")
    calls = message.get("tool_calls")
    if single:
        return [_plain_call({"function": single}, f"{where}.function_call", "")]
    if calls is None:
        return []
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise RequestError(
            f"{where}.tool_calls must be a list of at most {MAX_CALLS} tool calls, given {shown(calls)}",
            f"{where}.tool_calls",
        )
    return [_plain_call(call, f"{where}.tool_calls[{index}]", ".function") for index, call in enumerate(calls)]


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with the arguments of calls as JSON text, for templates that write the arguments as text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _plain_call(call: object, where: str, key: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(
            f"{where}{key} must be an object with name and arguments, given {shown(function)}", f"{where}{key}"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}{key}.name must be a string, given {shown(name)}", f"{where}{key}.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping | None):
        raise RequestError(
            f"{where}{key}.arguments must be a string with a JSON object, given {shown(arguments)}",
            f"{where}{key}.arguments",
        )
    plain = {"type": "function", "function": {"name": name, "arguments": _plain_arguments(arguments)}}
    return {**plain, "id": call["id"]} if isinstance(call.get("id"), str) else plain


def _plain_arguments(arguments: str | Mapping[str, Any] | None) -> Any:
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
