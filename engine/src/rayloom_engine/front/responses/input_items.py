"""Converts the input items of a Responses request into chat messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(slots=True)
class Conversation:
    """Chat messages, each with the path of the item that it was made from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, source: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.sources.append(source)


def conversation(instructions: str | None, items: object) -> Conversation:
    """Returns the chat messages for the fields `instructions` and `input`. Raises RequestError that names the item."""
    talk = Conversation()
    if instructions is not None:
        talk.add("instructions", {"role": "system", "content": instructions})
    if isinstance(items, str):
        talk.add("input", {"role": "user", "content": items})
        return talk
    if not isinstance(items, list):
        raise RequestError(f"input must be a string or a list of items, given {shown(items)}", "input")
    if not items:
        raise RequestError("input is empty; give at least one item", "input")
    for index, item in enumerate(items):
        _add_item(talk, f"input[{index}]", item)
    return talk


def _add_item(talk: Conversation, where: str, item: object) -> None:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where} must be an object, given {shown(item)}", where)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "message":
        _add_message(talk, where, item)
    elif kind == "reasoning":
        _add_reasoning(talk, where, item)
    elif kind == "function_call":
        _add_call(talk, where, item)
    elif kind == "function_call_output":
        talk.add(where, _tool_message(where, item))
    elif kind == "item_reference":
        raise RequestError(f"{where} refers to a stored item, but this server stores none; send the item itself", where)
    else:
        raise RequestError(
            f"{where}.type {shown(kind)} is not supported by this server; the types are message, function_call, "
            "function_call_output and reasoning",
            f"{where}.type",
        )


def _add_message(talk: Conversation, where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}, given {shown(role)}", f"{where}.role")
    text = text_of(item.get("content"), f"{where}.content")
    if role != "assistant":
        talk.add(where, {"role": role, "content": text})
        return
    message = _assistant(talk, where, ("content", "tool_calls"))
    message["content"] = text


def _add_reasoning(talk: Conversation, where: str, item: Mapping[str, Any]) -> None:
    """Adds the text of the reasoning, or of its summary if the item has no text. An empty item adds nothing."""
    text = text_of(item.get("content") or [], f"{where}.content", {"reasoning_text": "text", "text": "text"})
    text = text or text_of(item.get("summary") or [], f"{where}.summary", {"summary_text": "text"})
    if text:
        message = _assistant(talk, where, ("reasoning_content", "content", "tool_calls"))
        message["reasoning_content"] = text
    elif item.get("encrypted_content"):
        raise RequestError(
            f"{where}.encrypted_content cannot be read by this server; send the item's content, or leave the item out",
            f"{where}.encrypted_content",
        )


def _add_call(talk: Conversation, where: str, item: Mapping[str, Any]) -> None:
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    message = _assistant(talk, where, ())
    calls = message.setdefault("tool_calls", [])
    calls.append({"id": _string(item, "call_id", where), "type": "function", "function": function})


def _assistant(talk: Conversation, where: str, later: Sequence[str]) -> dict[str, Any]:
    """Returns the assistant's message that the item belongs to: the last message, or a new message.

    `later`: keys whose values come after the item in a message. The item begins a new message if the last message has
    one of these keys, or is not the assistant's.
    """
    last = talk.messages[-1] if talk.messages else None
    if last is None or last["role"] != "assistant" or any(last.get(key) for key in later):
        last = {"role": "assistant", "content": None}
        talk.add(where, last)
    return last


def _tool_message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = _string(item, "call_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"), f"{where}.output")}


def text_of(content: object, where: str, kinds: Mapping[str, str] = _TEXT_PARTS) -> str:
    """Returns the text of a content: a string, or a list of parts whose types are keys of `kinds`.

    `kinds`: type of a part -> the key of its text. Raises RequestError that names the part.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts, given {shown(content)}", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in kinds:
            raise RequestError(
                f"{where}[{index}] has type {shown(kind)}; this server takes only parts of type "
                f"{' and '.join(shown(each) for each in list(kinds)[:2])}",
                f"{where}[{index}].type",
            )
        texts.append(_string(part, kinds[kind], f"{where}[{index}]"))
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string, given {shown(value)}", f"{where}.{name}")
    return value
