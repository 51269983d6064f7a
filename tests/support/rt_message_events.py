"""A strict reader of Messages streams: events must be valid by the anthropic client's types, and in the right order."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import TypeAdapter

from rt_lazy import LazyModule
from rt_response_events import sse_events

types = LazyModule("anthropic.types")
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
TEXT_KEYS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


@dataclass
class StreamedMessage:
    """A whole, well-formed stream. `message` is assembled from the events in the way of the client."""

    events: list[dict[str, Any]]
    message: dict[str, Any]
    num_pings: int


def read_messages_stream(response: httpx.Response) -> StreamedMessage:
    """Reads the stream in a complete response. Fails at the first event that breaks a rule."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    received = sse_events(response.content)
    events = [event for event in received if event["type"] != "ping"]
    for event in events:
        _event_type().validate_python(event)
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = dict(events[0]["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["output_tokens"] == 0
    message["content"] = _blocks(events[1:-2])
    message.update(events[-2]["delta"])
    usage = events[-2]["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert message["usage"]["input_tokens"] == sum(usage[name] for name in parts)
    message["usage"] = usage
    types.Message.model_validate(message)
    assert message["stop_reason"] is not None
    return StreamedMessage(events=events, message=message, num_pings=len(received) - len(events))


@functools.cache
def _event_type() -> TypeAdapter[Any]:
    return TypeAdapter(types.RawMessageStreamEvent)


def _blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append(dict(event["content_block"]))
            block = blocks[-1]
            assert block.get("text", "") == block.get("thinking", "") == block.get("signature", "") == ""
            assert block.get("input", {}) == {}
            texts.append("")
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        kind = block["type"]
        if event["type"] == "content_block_stop":
            is_open = False
            block[{"tool_use": "input"}.get(kind, TEXT_KEYS[kind])] = (
                json.loads(texts[-1] or "{}") if kind == "tool_use" else texts[-1]
            )
        elif event["delta"]["type"] == "signature_delta":
            assert kind == "thinking"
            block["signature"] = event["delta"]["signature"]
        else:
            assert event["delta"]["type"] == DELTAS[kind]
            assert event["delta"][TEXT_KEYS[kind]]
            texts[-1] += event["delta"][TEXT_KEYS[kind]]
    assert not is_open, "the last block is open"
    return blocks
