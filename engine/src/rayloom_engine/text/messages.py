"""Chat messages as a user gives them to messages as a chat template wants them: plain objects with plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayloom_engine.errors import RequestError
from rayloom_engine.sampling_params import shown

ROLES = ("system", "developer", "user", "assistant", "tool")


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with a known role and a string as content; other keys are passed on to the template.

    Content parts of type text are joined; "developer" is OpenAI's newer word for "system". Raises RequestError naming
    the message and field at fault.
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
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, given {shown(role)}", f"{where}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(f"{where}.{name} is not supported; leave it out", f"{where}.{name}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _plain_content(message.get("content"), role, f"{where}.content")
    return plain


def _plain_content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise RequestError(f"{where} is missing; give a string or a list of text parts", where)
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{where}[{index}] has type {shown(kind)}; this server takes only parts of type 'text'",
                f"{where}[{index}].type",
            )
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].text must be a string", f"{where}[{index}].text")
        texts.append(text)
    return "".join(texts)
