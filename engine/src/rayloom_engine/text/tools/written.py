"""Writes tools, calls and their results into messages, for chat templates that cannot describe tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rayloom_engine.text.message_parsing.tool_formats import ToolFormat


def written_messages(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    format: ToolFormat,
    *,
    has_system: bool,
) -> list[dict[str, Any]]:
    """Returns messages that have only the roles system, user and assistant.

    The system message describes the tools. If the template renders no system message, the first message describes them.
    Calls are written into the assistant's content, in the tool format. Results of tools become messages of the user.
    """
    result: list[dict[str, Any]] = []
    responses: list[str] = []  # results of consecutive tool messages
    for message in messages:
        if message["role"] == "tool":
            responses.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        _add_responses(result, responses)
        if message.get("tool_calls"):
            calls = written_calls(message["tool_calls"], format)
            content = f"{message['content']}\n{calls}" if message["content"] else calls
            result.append({**_without(message, "tool_calls"), "content": content})
        else:
            result.append(message)
    _add_responses(result, responses)
    return _with_instructions(result, instructions(tools, format), has_system=has_system) if tools else result


def instructions(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Returns the text that describes to the model the tools and how to call them."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\n"
        "You can call functions to answer the user. Each line between the tags describes one function in JSON:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        f"To call a function, answer in exactly this form, with the function's name and arguments:\n{format.example}"
    )


def written_calls(calls: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Returns calls as a model of this format would have written them."""
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if format.syntax == "python":
        return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in functions)}]"
    if format.syntax == "xml":
        texts = [f"<function={name}>\n{_tags(arguments)}</function>" for name, arguments in functions]
    else:
        texts = [_json({"name": name, format.arguments_key: arguments}) for name, arguments in functions]
    if format.is_list:
        return f"{format.openers[0]}[{', '.join(texts)}]"
    if format.separators:
        return f"{format.separators[0]} ".join(texts)
    return "\n".join(f"{format.openers[0]}\n{text}\n{format.closers[0]}" for text in texts)


def _with_instructions(messages: list[dict[str, Any]], text: str, *, has_system: bool) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] == "system" or not has_system:
        content = f"{first['content']}\n\n{text}" if first["role"] == "system" else f"{text}\n\n{first['content']}"
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _add_responses(messages: list[dict[str, Any]], responses: list[str]) -> None:
    """Adds the responses as one message of the user, and empties their list."""
    if responses:
        messages.append({"role": "user", "content": "\n".join(responses)})
        responses.clear()


def _without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def _keywords(arguments: Any) -> str:
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    return ", ".join(f"{key}={value!r}" for key, value in given)


def _tags(arguments: Any) -> str:
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    return "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in given
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
