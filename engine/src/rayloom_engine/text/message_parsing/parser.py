"""TextParser: the parser of a message in any format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rayloom_engine.text.message_parsing.channels import ChannelReader
from rayloom_engine.text.message_parsing.incoming import IncomingText
from rayloom_engine.text.message_parsing.reasoning_formats import ReasoningFormat
from rayloom_engine.text.message_parsing.sink import CallRules, PartSink
from rayloom_engine.text.message_parsing.tagged import TaggedReader
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, ToolFormat
from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning, ToolCallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSettings:
    """The formats that the text of one request can have."""

    tools: ToolFormat | None = None  # None: the request has no tools, so nothing is a call
    reasoning: ReasoningFormat | None = None
    is_harmony: bool = False  # all messages have harmony's headers, with or without tools
    is_open: bool = False  # the prompt ends inside the reasoning
    hidden: Collection[str] = ()  # tags that are special tokens of the model

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return self.tools is None and self.reasoning is None and not self.is_harmony


class TextParser:
    """Implements MessageParser. Neighbouring texts of the same kind come as one part."""

    def __init__(self, settings: ParserSettings, rules: CallRules) -> None:
        self._incoming = IncomingText()
        self._sink = PartSink(rules, holds_blanks=settings.tools is not None and settings.tools is not HARMONY)
        if settings.is_harmony:
            self._reader: ChannelReader | TaggedReader = ChannelReader(self._incoming, self._sink)
        else:
            self._reader = TaggedReader(
                self._incoming,
                self._sink,
                settings.tools,
                settings.reasoning,
                is_open=settings.is_open,
                hidden=settings.hidden,
            )
        self._reading = self._reader.read()

    def add(self, text: str) -> list[MessagePart]:
        if not self._incoming.pass_on(text):
            self._incoming.append(text)
            next(self._reading)
        return _joined(self._sink.take())

    def finish(self) -> list[MessagePart]:
        self._incoming.is_ended = True
        next(self._reading, None)
        return _joined(self._sink.take())

    @property
    def num_tool_calls(self) -> int:
        return self._sink.num_calls

    @property
    def reasoning_end(self) -> int | None:
        """Number of characters of the text that belong to the reasoning, tags included; None while the reasoning
        continues.
        """
        return self._reader.reasoning_end


def _joined(parts: list[MessagePart]) -> list[MessagePart]:
    if len(parts) <= 1:
        return parts
    joined: list[MessagePart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == part.index:
            joined[-1] = ToolCallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
