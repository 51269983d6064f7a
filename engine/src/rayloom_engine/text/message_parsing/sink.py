"""PartSink: turns the texts and calls that readers find into the parts of a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_engine.text.message_parsing.incoming import BLANKS
from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning, ToolCallArguments, ToolCallStart

PlainKind = type[Content] | type[Reasoning]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The properties of a request that decide how tool calls are parsed."""

    schemas: Mapping[str, Mapping[str, Any]]  # function name -> JSON schema of its arguments
    call_id: Callable[[int], str]  # number of a call -> its id
    max_calls: int | None = None  # calls beyond this number are dropped; None: no limit


@dataclass(slots=True)
class PartSink:
    """Collects the parts of one message.

    Blanks at the end of the reasoning, and blanks between content and a call, are dropped. So the sink holds blanks
    back until more text or a call arrives.
    """

    rules: CallRules
    holds_blanks: bool = True
    num_started: int = 0
    _parts: list[MessagePart] = field(default_factory=list)
    _blanks: list[str] = field(default_factory=list)  # blanks that are held back, in a list because there may be many

    def take(self) -> list[MessagePart]:
        """Returns the parts since the last call."""
        parts = self._parts
        self._parts = []
        return parts

    def content(self, text: str) -> None:
        if self.holds_blanks:
            text = self._without_last_blanks(text)
        if text:
            self._parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        text = self._without_last_blanks(text)
        if text:
            self._parts.append(Reasoning(text))

    def kind_of(self, emit: Callable[[str], None]) -> PlainKind | None:
        """Returns the kind of part that `emit` makes of a text; None unless `emit` is `content` or `reasoning`."""
        if emit == self.content:
            return Content
        return Reasoning if emit == self.reasoning else None

    def trims(self, text: str) -> bool:
        """True if the part for `text` would differ from `text`: blanks are held back, or `text` ends with a blank."""
        return bool(self._blanks) or text[-1:] in BLANKS

    def drop_blanks(self) -> None:
        """Drops blanks that are held back."""
        self._blanks.clear()

    def end(self) -> None:
        """Releases blanks at the end of the content."""
        if self._blanks:
            self._parts.append(Content("".join(self._blanks)))
            self._blanks.clear()

    def start(self, name: str) -> None:
        """Starts the next call."""
        self._blanks.clear()
        self.num_started += 1
        if self._is_kept:
            index = self.num_started - 1
            self._parts.append(ToolCallStart(index, self.rules.call_id(index), name))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last started call."""
        if text and self._is_kept:
            self._parts.append(ToolCallArguments(self.num_started - 1, text))

    @property
    def num_calls(self) -> int:
        """Number of calls that are parts of the message."""
        limit = self.rules.max_calls
        return self.num_started if limit is None else min(self.num_started, limit)

    @property
    def _is_kept(self) -> bool:
        return self.num_calls == self.num_started

    def _without_last_blanks(self, text: str) -> str:
        kept = text.rstrip(BLANKS)
        if kept:
            before = "".join(self._blanks)
            self._blanks.clear()
        else:
            before = ""
        if len(kept) < len(text):
            self._blanks.append(text[len(kept) :])
        return before + kept
