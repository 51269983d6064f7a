"""Helpers for tests of message parsers."""

from __future__ import annotations

from typing import Any

from rayloom_engine.text.message_parsing.message import Message
from rayloom_engine.text.message_parsing.parser import ParserSettings, TextParser
from rayloom_engine.text.message_parsing.sink import CallRules
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, ToolFormat
from rayloom_engine.text.message_parts import MessagePart

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": ["number", "null"]},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "best-of": {"type": "array"},
        },
    },
    "stop": {"type": "object", "properties": {}},
}


def parser(format: ToolFormat | None, **given: Any) -> TextParser:
    max_calls, schemas = given.pop("max_calls", None), given.pop("schemas", SCHEMAS)
    rules = CallRules(schemas=schemas, call_id=lambda index: f"id{index}", max_calls=max_calls)
    return TextParser(ParserSettings(tools=format, is_harmony=format is HARMONY, **given), rules)


def parts_of(made: TextParser, pieces: list[str]) -> list[MessagePart]:
    return [part for piece in pieces for part in made.add(piece)] + made.finish()


def parsed(format: ToolFormat | None, text: str, **given: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and (name, arguments) of each call. Asserts that single characters give the same."""
    found = []
    for pieces in ([text], list(text)):
        message = Message()
        message.add(parts_of(parser(format, **given), pieces))
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        found.append((message.content, message.reasoning, calls))
    assert found[0] == found[1]
    return found[0]
