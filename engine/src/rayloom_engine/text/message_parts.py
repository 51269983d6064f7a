"""The parts of an assistant's message: content, reasoning and tool calls, in the order in which the model wrote them.

A MessageParser finds the parts in the generated text. The APIs (chat, Responses, Messages) write the parts as JSON
documents and events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of the tool call number `index`, counted from 0. Its name is complete."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More text of a call's arguments. The texts of one call, joined, are a JSON object."""

    index: int
    text: str


MessagePart = Content | Reasoning | ToolCallStart | ToolCallArguments


class MessageParser(Protocol):
    """The parsing state of one choice. Depends on the generated text alone, so a new front can compute it again."""

    def add(self, text: str) -> list[MessagePart]:
        """Returns the parts that are certain after `text`. A text that may be the beginning of a tag is held back."""
        ...

    def finish(self) -> list[MessagePart]:
        """Returns the remaining parts at the end of the answer."""
        ...

    @property
    def num_tool_calls(self) -> int:
        """Number of calls that have started."""
        ...
