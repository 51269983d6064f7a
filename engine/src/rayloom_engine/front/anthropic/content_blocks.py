"""ContentBlocks: writes a message as the content blocks of an answer, and as the events of its stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import pydantic_core

from rayloom_engine.text.message_parsing.items import Change, Grew, Item, MessageItems, Opened
from rayloom_engine.text.message_parts import MessagePart


class ContentBlocks:
    """The content blocks of one message. Methods return the events of changed blocks."""

    def __init__(self) -> None:
        self._message = MessageItems()

    def add(self, parts: Iterable[MessagePart]) -> list[dict[str, Any]]:
        """Returns the events for more parts of the message."""
        return [event for change in self._message.add(parts) for event in _events(change)]

    def finish(self) -> list[dict[str, Any]]:
        """Returns the events at the end of the message."""
        return [event for change in self._message.finish(is_cut=False) for event in _events(change)]

    def documents(self) -> list[dict[str, Any]]:
        """Returns the content blocks of the message so far, in order."""
        return [_block(item) for item in self._message.items]

    @property
    def has_whole_call(self) -> bool:
        """True if the message has tool calls, and the input of the last call is a JSON object."""
        calls = [item for item in self._message.items if item.kind == "tool_call"]
        return bool(calls) and _is_object(calls[-1].text)


def _events(change: Change) -> Iterable[dict[str, Any]]:
    item = change.item
    if isinstance(change, Opened):
        yield {"type": "content_block_start", "index": item.index, "content_block": _block(item, is_new=True)}
    elif isinstance(change, Grew):
        yield _delta(item, **_text_delta(item, change.text))
    else:
        if item.kind == "reasoning":
            yield _delta(item, type="signature_delta", signature=_signature(item))
        yield {"type": "content_block_stop", "index": item.index}


def _text_delta(item: Item, text: str) -> dict[str, Any]:
    if item.kind == "content":
        return {"type": "text_delta", "text": text}
    if item.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _delta(item: Item, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": item.index, "delta": delta}


def _block(item: Item, *, is_new: bool = False) -> dict[str, Any]:
    # the event of a new block has no text: if `item` has text already, later events carry the text
    text = "" if is_new else item.text
    if item.kind == "content":
        return {"type": "text", "text": text, "citations": None}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": "" if is_new else _signature(item)}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {} if is_new else _input(item.text)}


def _signature(item: Item) -> str:
    """Returns a checksum of the text. Clients drop a thinking block that has no signature. This server checks no
    signatures."""
    return hashlib.blake2b(item.text.encode(), digest_size=16).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments as an object. If the JSON text is cut off, returns the complete part of it."""
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):  # RecursionError: a model may write thousands of brackets
        return False
