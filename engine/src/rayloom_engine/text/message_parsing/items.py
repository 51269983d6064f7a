"""MessageItems: groups the parts of a message into items, for endpoints whose answers are lists of items.

An item is a run of parts of one kind: text of the answer, reasoning, or one tool call. Responses calls these items
output items, Messages calls them content blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rayloom_engine.text.message_parts import MessagePart, Reasoning, ToolCallArguments, ToolCallStart

Kind = Literal["content", "reasoning", "tool_call"]


@dataclass(slots=True, kw_only=True)
class Item:
    """A run of content, a run of reasoning, or a tool call. In a tool call, `text` has the arguments as JSON."""

    index: int  # counted from 0
    kind: Kind
    call_id: str = ""  # id of a tool call
    name: str = ""  # name of a tool call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    """The item has begun. Its text is empty."""

    item: Item


@dataclass(frozen=True, slots=True)
class Grew:
    """The item has more text."""

    item: Item
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The item is complete, or the answer ended inside it."""

    item: Item
    is_cut: bool = False


Change = Opened | Grew | Closed


class MessageItems:
    """The items of one message. Only the last item can be open; parts may still be added to an open item."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None

    def add(self, parts: Iterable[MessagePart]) -> list[Change]:
        """Returns the changes that `parts` make, in order."""
        changes: list[Change] = []
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._begin("tool_call", changes, call_id=part.call_id, name=part.name)
            elif isinstance(part, ToolCallArguments):
                assert self._open is not None and self._open.kind == "tool_call", "arguments outside a call"
                self._grow(part.text, changes)
            elif part.text:
                kind: Kind = "reasoning" if isinstance(part, Reasoning) else "content"
                if self._open is None or self._open.kind != kind:
                    self._begin(kind, changes)
                self._grow(part.text, changes)
        return changes

    def finish(self, *, is_cut: bool) -> list[Change]:
        """Returns the changes at the end of the message. A message without any item gets an empty item of content.

        `is_cut`: the answer reached its limit of tokens, so the open item is incomplete.
        """
        changes: list[Change] = []
        if not self.items:
            self._begin("content", changes)
        if self._open is not None:
            changes.append(Closed(self._open, is_cut))
            self._open = None
        return changes

    @property
    def num_calls(self) -> int:
        """Number of tool calls that have started."""
        return sum(item.kind == "tool_call" for item in self.items)

    def _begin(self, kind: Kind, changes: list[Change], *, call_id: str = "", name: str = "") -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
        self._open = Item(index=len(self.items), kind=kind, call_id=call_id, name=name)
        self.items.append(self._open)
        changes.append(Opened(self._open))

    def _grow(self, text: str, changes: list[Change]) -> None:
        assert self._open is not None
        if text:
            self._open.pieces.append(text)
            changes.append(Grew(self._open, text))
