"""Message: the parts of an assistant's message, joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning, ToolCallArguments, ToolCallStart


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A tool call. `arguments` is the text of a JSON object, as the model wrote it."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """An assistant's message. A message without tool calls has content, which may be an empty text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[MessagePart]) -> None:
        """Appends parts in the order in which a parser returned them."""
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, ToolCallStart):
                self.tool_calls.append(ToolCall(call_id=part.call_id, name=part.name))
            elif isinstance(part, ToolCallArguments):
                self.tool_calls[part.index].arguments += part.text
