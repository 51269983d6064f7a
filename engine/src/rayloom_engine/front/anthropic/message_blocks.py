"""Converts the messages of a Messages request into chat messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError

# Claude Code puts a text block in front of its system message. The block has a checksum that differs in every request.
# The block is left out, so that the prefix cache finds the common prefix of requests.
_BILLING_HEADER = "x-anthropic-billing-header:"


@dataclass(slots=True)
class ChatHistory:
    """Chat messages, each with the path of the block or message that it was made from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, source: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.sources.append(source)


def chat_history(system: object, messages: list[Any]) -> ChatHistory:
    """Returns the chat messages for the fields `system` and `messages`. Raises RequestError that names the block."""
    history = ChatHistory()
    if system is not None:
        texts = _texts(system, "system", separator="\n\n")
        if texts:
            history.add("system", {"role": "system", "content": texts})
    if not messages:
        raise RequestError("messages is empty; give at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or role not in ("user", "assistant", "system"):
            raise RequestError(
                f'{where}.role must be "user", "assistant" or "system", given {shown(role)}', f"{where}.role"
            )
        content = message.get("content")
        if isinstance(content, str):
            history.add(where, {"role": role, "content": content})
        elif role == "system":
            history.add(where, {"role": role, "content": _texts(content, f"{where}.content", separator="\n\n")})
        elif not isinstance(content, list):
            raise RequestError(
                f"{where}.content must be a string or a list of blocks, given {shown(content)}", f"{where}.content"
            )
        elif role == "user":
            _add_user(history, where, content)
        else:
            history.add(where, _assistant(where, content))
    return history


def _add_user(history: ChatHistory, where: str, blocks: list[Any]) -> None:
    """Adds a message for each tool result, and a message for each run of text blocks."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = _kind(block, place)
        if kind == "text":
            texts.append(_string(block, "text", place))
        elif kind == "tool_result":
            if texts:
                history.add(where, {"role": "user", "content": "".join(texts)})
                texts = []
            content = block.get("content")
            result = "" if content is None else _texts(content, f"{place}.content", separator="")
            call_id = _string(block, "tool_use_id", place)
            history.add(place, {"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            raise _unsupported(kind, place, '"text" and "tool_result"')
    if texts or not blocks:
        history.add(where, {"role": "user", "content": "".join(texts)})


def _assistant(where: str, blocks: list[Any]) -> dict[str, Any]:
    content: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        kind = _kind(block, place)
        if kind == "text":
            content.append(_string(block, "text", place))
        elif kind == "thinking":
            thinking.append(_string(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # the block's text is encrypted, so that only Anthropic's server can read it
            raise _unsupported(kind, place, '"text", "thinking" and "tool_use"')
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content) if content or not calls else None}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{place}.input must be an object, given {shown(arguments)}", f"{place}.input")
    function = {"name": _string(block, "name", place), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _string(block, "id", place), "type": "function", "function": function}


def _texts(content: object, where: str, *, separator: str) -> str:
    """Returns `content` if it is a string, else its joined text blocks, without the billing header."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text blocks, given {shown(content)}", where)
    texts = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = _kind(block, place)
        if kind != "text":
            raise _unsupported(kind, place, '"text"')
        text = _string(block, "text", place)
        if not text.startswith(_BILLING_HEADER):
            texts.append(text)
    return separator.join(texts)


def _kind(block: object, place: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f"{place} must be an object with a type, given {shown(block)}", place)
    return kind


def _unsupported(kind: str, place: str, allowed: str) -> RequestError:
    return RequestError(
        f"{place} has type {shown(kind)}; this server takes only blocks of type {allowed} here", f"{place}.type"
    )


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} must be a string, given {shown(value)}", f"{place}.{name}")
    return value
