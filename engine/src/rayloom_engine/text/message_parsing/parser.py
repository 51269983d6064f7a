"""TextParser: the parser of a message in any format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rayloom_engine.text.message_parsing.channels import ChannelReader
from rayloom_engine.text.message_parsing.incoming import IncomingText, markers_of
from rayloom_engine.text.message_parsing.reasoning_formats import ReasoningFormat
from rayloom_engine.text.message_parsing.sink import CallRules, PartSink, PlainKind
from rayloom_engine.text.message_parsing.tagged import TaggedReader
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, ToolFormat
from rayloom_engine.text.message_parts import Content, MessagePart, Reasoning, ToolCallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSettings:
    """The formats that the text of one request can have."""

    tools: ToolFormat | None = None  # None: the request has no tools, so no text is a call
    reasoning: ReasoningFormat | None = None
    is_harmony: bool = False  # all messages have harmony's headers, with or without tools
    is_open: bool = False  # the prompt ends inside the reasoning
    hidden: Collection[str] = ()  # tags that are special tokens of the model

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return self.tools is None and self.reasoning is None and not self.is_harmony


class TextParser:
    """Implements MessageParser. Neighbouring texts of the same kind are joined into one part."""

    __slots__ = ("_find_marker", "_incoming", "_may_trim", "_num_plain", "_reader", "_reading", "_sink", "plain_kind")

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
        # While the reader waits for a marker, all new text becomes a part of this kind. None: the kind is not certain.
        self.plain_kind: PlainKind | None = None
        self._find_marker = markers_of(()).find_first_char
        self._may_trim = False
        self._num_plain = 0  # number of characters that `reads` has read since the last `add`

    def add(self, text: str) -> list[MessagePart]:
        self._count_plain()
        if not self._incoming.pass_on(text):
            self._incoming.append(text)
            next(self._reading)
            self._find_kind()
        return _joined(self._sink.take())

    def reads(self, text: str, kind: PlainKind) -> bool:
        """Reads `text` and returns True if `add` would return a single part, of this kind and with exactly this text.

        Otherwise returns False, without any effect.
        """
        if kind is not self.plain_kind or not text or self._find_marker(text) is not None:
            return False
        if self._may_trim and self._sink.trims(text):
            return False
        self._num_plain += len(text)
        return True

    def _count_plain(self) -> None:
        self._incoming.skip(self._num_plain)
        self._num_plain = 0

    def _find_kind(self) -> None:
        wait = None if self._incoming.is_marked else self._incoming.wait
        self.plain_kind = None if wait is None else self._sink.kind_of(wait.emit)
        self._may_trim = self.plain_kind is Reasoning or self._sink.holds_blanks
        if wait is not None:
            self._find_marker = wait.markers.find_first_char

    def finish(self) -> list[MessagePart]:
        self._count_plain()
        self.plain_kind = None
        self._incoming.is_ended = True
        next(self._reading, None)
        return _joined(self._sink.take())

    @property
    def num_tool_calls(self) -> int:
        return self._sink.num_calls

    @property
    def reasoning_end(self) -> int | None:
        """Number of characters of the reasoning, tags included; None while the reasoning continues."""
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
