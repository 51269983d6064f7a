"""PlainParser: the parser of a model whose text has neither reasoning nor tool calls."""

from __future__ import annotations

from rayloom_engine.text.message_parts import Content, MessagePart


class PlainParser:
    """Returns all text as content."""

    num_tool_calls = 0
    reasoning_end = 0

    def add(self, text: str) -> list[MessagePart]:
        return [Content(text)] if text else []

    def finish(self) -> list[MessagePart]:
        return []
