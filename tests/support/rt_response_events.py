"""A strict reader of Responses streams: events must be valid by the openai client's types, and in the right order."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import TypeAdapter

from rt_lazy import LazyModule

types = LazyModule("openai.types.responses")
STEMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
ENDS = ("response.completed", "response.incomplete")


@dataclass
class StreamedItem:
    """An item of the output, assembled from events."""

    kind: str
    item_id: str
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    is_part_open: bool = False
    is_text_done: bool = False
    is_done: bool = False


@dataclass
class StreamedResponse:
    """A whole, well-formed stream."""

    events: list[dict[str, Any]]
    items: list[StreamedItem]
    final: dict[str, Any]  # the response in the last event


def sse_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a body, without comments. Each event's name must be the type of its document."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == "", "the stream ends in the middle of an event"
    events = []
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        events.append(document)
    return events


def read_responses_stream(response: httpx.Response) -> StreamedResponse:
    """Reads the stream in a complete response. Fails at the first event that breaks a rule."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = sse_events(response.content)
    for number, event in enumerate(events):
        _event_type().validate_python(event)
        assert event["sequence_number"] == number
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    assert events[-1]["type"] in ENDS
    items: list[StreamedItem] = []
    for event in events[2:-1]:
        _take(event, items)
    final = events[-1]["response"]
    types.Response.model_validate(final)
    assert events[-1]["type"] == f"response.{final['status']}"
    assert final["id"] == events[0]["response"]["id"]
    assert [each["id"] for each in final["output"]] == [item.item_id for item in items]
    assert [item_text(each) for each in final["output"]] == [item.text for item in items]
    return StreamedResponse(events=events, items=items, final=final)


@functools.cache
def _event_type() -> TypeAdapter[Any]:
    return TypeAdapter(types.ResponseStreamEvent)


def item_text(item: dict[str, Any]) -> str:
    """The text of an item's only part, or the arguments of a call."""
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def _take(event: dict[str, Any], items: list[StreamedItem]) -> None:
    kind = event["type"].removeprefix("response.")
    if kind == "output_item.added":
        assert all(item.is_done for item in items), "an item begins inside another"
        assert event["output_index"] == len(items)
        assert event["item"]["status"] == "in_progress"
        assert event["item"].get("content", []) == [] and event["item"].get("arguments", "") == ""
        items.append(StreamedItem(kind=event["item"]["type"], item_id=event["item"]["id"]))
        return
    item = items[-1]
    assert not item.is_done, f"{kind} after the end of the item"
    assert event["output_index"] == len(items) - 1
    if kind == "output_item.done":
        assert item.is_text_done and not item.is_part_open
        assert event["item"]["id"] == item.item_id and item_text(event["item"]) == item.text
        item.is_done = True
        return
    assert event["item_id"] == item.item_id
    if item.kind != "function_call":
        assert event["content_index"] == 0
    if kind == "content_part.added":
        assert not item.is_part_open and event["part"]["text"] == ""
        item.is_part_open = True
    elif kind == f"{STEMS[item.kind]}.delta":
        assert event["delta"] and not item.is_text_done
        assert item.is_part_open or item.kind == "function_call"
        item.text += event["delta"]
        item.logprobs += event.get("logprobs", [])
    elif kind == f"{STEMS[item.kind]}.done":
        assert not item.is_text_done
        assert event["arguments" if item.kind == "function_call" else "text"] == item.text
        item.is_text_done = True
    else:
        assert kind == "content_part.done", f"{kind} in an item of the type {item.kind}"
        assert item.is_part_open and item.is_text_done and event["part"]["text"] == item.text
        item.is_part_open = False
