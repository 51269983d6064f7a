"""OutputItems: writes a message as the output items of a response, and as the events of its stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayloom_engine.front.http.json_pieces import LazyList
from rayloom_engine.text.message_parsing.items import Change, Closed, Grew, Item, MessageItems, Opened
from rayloom_engine.text.message_parts import MessagePart

_ID_PREFIX = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}
_STEM = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "tool_call": "response.function_call_arguments",
}


class OutputItems:
    """The items of one response. The returned events have no `sequence_number` yet."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._message = MessageItems()
        self._cut: Item | None = None  # the item inside which the answer ended
        self._logprobs: dict[int, list[Any]] = {}  # index of an item -> log-probabilities of its tokens
        self._pending: list[Any] = []  # log-probabilities of tokens whose text has not been written yet

    def add(self, parts: Iterable[MessagePart], logprobs: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """Returns the events for more parts of the message.

        `logprobs`: entries for the tokens of the parts' text. The entries are written with the next text of the answer,
        and dropped if no text follows.
        """
        self._pending.extend(logprobs)
        return [event for change in self._message.add(parts) for event in self._events(change)]

    def finish(self, *, is_cut: bool) -> list[dict[str, Any]]:
        """Returns the events at the end of the message. `is_cut`: the answer ended at the limit of tokens."""
        return [event for change in self._message.finish(is_cut=is_cut) for event in self._events(change)]

    def documents(self, logprobs: list[Any] | LazyList | None = None) -> list[dict[str, Any]]:
        """Returns all items. `logprobs`: entries of a whole answer, written into the first text item."""
        documents = []
        for item in self._message.items:
            if logprobs is not None and item.kind == "content":
                documents.append(self._document(item, logprobs))
                logprobs = None
            else:
                documents.append(self._document(item, self._logprobs.get(item.index, [])))
        return documents

    def _events(self, change: Change) -> Iterable[dict[str, Any]]:
        item = change.item
        if isinstance(change, Opened):
            yield self._event("response.output_item.added", item, item=self._new_document(item))
            if item.kind != "tool_call":
                yield self._part_event("response.content_part.added", item, part=_part(item, "", []))
        elif isinstance(change, Grew):
            logprobs = {"logprobs": self._take_logprobs(item)} if item.kind == "content" else {}
            yield self._part_event(f"{_STEM[item.kind]}.delta", item, delta=change.text, **logprobs)
        else:
            yield from self._closing_events(change)

    def _closing_events(self, change: Closed) -> Iterable[dict[str, Any]]:
        item = change.item
        if change.is_cut:
            self._cut = item
        if item.kind == "content":
            self._take_logprobs(item)
        logprobs = self._logprobs.get(item.index, [])
        done = f"{_STEM[item.kind]}.done"
        if item.kind == "tool_call":
            yield self._part_event(done, item, name=item.name, arguments=item.text)
        else:
            extra = {"logprobs": logprobs} if item.kind == "content" else {}
            yield self._part_event(done, item, text=item.text, **extra)
            yield self._part_event("response.content_part.done", item, part=_part(item, item.text, logprobs))
        yield self._event("response.output_item.done", item, item=self._document(item, logprobs))

    def _take_logprobs(self, item: Item) -> list[Any]:
        taken = self._pending
        self._pending = []
        self._logprobs.setdefault(item.index, []).extend(taken)
        return taken

    def _event(self, kind: str, place: Item, /, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "output_index": place.index, **fields}

    def _part_event(self, kind: str, item: Item, **fields: Any) -> dict[str, Any]:
        place = {} if item.kind == "tool_call" else {"content_index": 0}
        return self._event(kind, item, item_id=self._id(item), **place, **fields)

    def _id(self, item: Item) -> str:
        return f"{_ID_PREFIX[item.kind]}_{self._request_id}_{item.index}"

    def _new_document(self, item: Item) -> dict[str, Any]:
        """Returns the document of a new item without text: later events carry the text that `item` has already."""
        head = {"id": self._id(item), "status": "in_progress"}
        return {**head, **_body(item, "", [])}

    def _document(self, item: Item, logprobs: list[Any] | LazyList) -> dict[str, Any]:
        head = {"id": self._id(item), "status": "incomplete" if item is self._cut else "completed"}
        return {**head, **_body(item, item.text, [_part(item, item.text, logprobs)])}


def _body(item: Item, text: str, content: list[Any]) -> dict[str, Any]:
    if item.kind == "tool_call":
        return {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": text}
    if item.kind == "reasoning":
        return {"type": "reasoning", "summary": [], "content": content}
    return {"type": "message", "role": "assistant", "content": content}


def _part(item: Item, text: str, logprobs: list[Any] | LazyList) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
