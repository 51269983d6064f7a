"""Converts the chat messages of a request into messages for a chat template: plain objects with plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.text.tools.calls_in_messages import plain_calls

MAX_ROLE_CHARS = 64
# Roles whose content may be null, as in OpenAI's API.
_MAY_BE_EMPTY = ("assistant", "function")
_CALLS = ("tool_calls", "function_call")


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Returns messages with a role and a string as content. Other keys are passed on to the template.

    Joins content parts of type text. Replaces the role "developer", OpenAI's newer word, by "system". An assistant's
    refusal becomes its content. The arguments of tool calls become objects. The template decides whether the model
    knows a role. Raises RequestError that names the wrong message and field.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages", "messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise RequestError(
            f'{where}.role must be a word of at most {MAX_ROLE_CHARS} characters, such as "user", given {shown(role)}',
            f"{where}.role",
        )
    if message.get("audio"):
        raise RequestError(
            f"{where}.audio is not supported by this server; leave it out, or write it into the content",
            f"{where}.audio",
        )
    plain = {key: value for key, value in message.items() if value is not None and key not in _CALLS}
    calls = plain_calls(message, where)
    if calls:
        plain["tool_calls"] = calls
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):  # templates read the reasoning under either name
        plain["reasoning"] = plain["reasoning_content"] = reasoning
    plain["role"] = "system" if role == "developer" else role
    content = message.get("content")
    if content is None and role == "assistant":
        content = plain.pop("refusal", None)
    plain["content"] = _plain_content(content, role, f"{where}.content")
    return plain


def _plain_content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise RequestError(f"{where} is missing; give a string or a list of text parts", where)
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" and not (kind == "refusal" and role == "assistant"):
            raise RequestError(
                f'{where}[{index}] has type {shown(kind)}; this server takes only parts of type "text"',
                f"{where}[{index}].type",
            )
        text = part.get(kind) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].{kind} must be a string", f"{where}[{index}].{kind}")
        texts.append(text)
    return "".join(texts)
