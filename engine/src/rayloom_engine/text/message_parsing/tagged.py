"""Reads messages whose reasoning and tool calls are marked by tags."""

from __future__ import annotations

from collections.abc import Collection

from rayloom_engine.text.message_parsing.call_start import MAX_START_CHARS, begins_call
from rayloom_engine.text.message_parsing.calls.named_call import named_call
from rayloom_engine.text.message_parsing.calls.object_call import object_call
from rayloom_engine.text.message_parsing.calls.python_call import python_call
from rayloom_engine.text.message_parsing.calls.xml_call import xml_call
from rayloom_engine.text.message_parsing.incoming import (
    IncomingText,
    NoCall,
    Reading,
    blanks,
    markers_of,
    one_of,
    until,
)
from rayloom_engine.text.message_parsing.reasoning_formats import ReasoningFormat
from rayloom_engine.text.message_parsing.sink import PartSink
from rayloom_engine.text.message_parsing.tool_formats import ToolFormat


class TaggedReader:
    """Reads one message by its tool format and its reasoning format.

    Without a tool format, no text is a call. Without a reasoning format, no text is reasoning.
    """

    def __init__(
        self,
        incoming: IncomingText,
        sink: PartSink,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        is_open: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        """`is_open`: the text begins inside the reasoning.

        `hidden`: tags that are special tokens of the model. Such a tag is never content, not even in a wrong place.
        """
        self._incoming = incoming
        self._sink = sink
        self._tools = tools
        self._reasoning = reasoning
        self._is_open = is_open
        self._hidden = frozenset(hidden)
        openers = (*tools.openers, *tools.bare_openers) if tools is not None else ()
        self._openers = frozenset(openers)
        self._markers = markers_of((*openers, *self._hidden))
        # position at which the reasoning ends; None while it is not known
        self.reasoning_end: int | None = None if reasoning is not None else 0

    def read(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._tools is not None and self._tools.first_openers:
            yield from self._read_first_call(self._tools)
        while marker := (yield from until(self._incoming, self._markers, self._sink.content)):
            if marker in self._openers:
                yield from self._read_calls_after(marker)
        self._sink.end()

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        incoming = self._incoming
        incoming.mark()
        yield from blanks(incoming)
        if not (yield from one_of(incoming, (reasoning.start,))) and not self._is_open:
            incoming.rewind()
            self.reasoning_end = 0
            return
        incoming.release()
        yield from blanks(incoming)
        openers = self._openers if reasoning.call_ends_it else frozenset()
        markers = markers_of((reasoning.end, *sorted(openers)))
        while (marker := (yield from until(incoming, markers, self._sink.reasoning))) in openers:
            incoming.at -= len(marker)
            if (yield from self._begins_call(marker)):
                break
            incoming.at += len(marker)
            if marker not in self._hidden:
                self._sink.reasoning(marker)
        self.reasoning_end = incoming.position
        self._sink.drop_blanks()
        yield from blanks(incoming)

    def _begins_call(self, opener: str) -> Reading[bool]:
        """Returns whether a call begins after the opener at the present position. Reads nothing."""
        assert self._tools is not None
        incoming = self._incoming
        num_skipped = 0 if opener in self._tools.bare_openers else len(opener)
        while True:
            start = incoming.at + num_skipped
            text = incoming.text[start : start + MAX_START_CHARS]
            found = begins_call(text, self._tools, is_ended=incoming.is_ended)
            if found is not None:
                return found
            yield

    def _read_first_call(self, tools: ToolFormat) -> Reading[None]:
        self._incoming.mark()
        if (yield from blanks(self._incoming)) in tools.first_openers:
            try:
                yield from self._read_calls(tools)
                return
            except NoCall:
                pass
        self._incoming.rewind()

    def _read_calls_after(self, opener: str) -> Reading[None]:
        assert self._tools is not None
        if opener in self._tools.bare_openers:
            self._incoming.at -= len(opener)
        self._incoming.mark()
        try:
            yield from self._read_calls(self._tools)
        except NoCall:
            self._incoming.rewind()
            if opener in self._tools.bare_openers:
                self._incoming.at += len(opener)
            if opener not in self._hidden:
                self._sink.content(opener)

    def _read_calls(self, tools: ToolFormat) -> Reading[None]:
        """Reads the calls after an opener, and the closer. Raises NoCall if there is no call after the opener."""
        incoming = self._incoming
        is_list = (yield from blanks(incoming)) == "[" and tools.is_list
        incoming.at += is_list
        yield from self._read_call(tools, is_list)
        while True:
            incoming.mark()
            yield from blanks(incoming)
            if not (yield from one_of(incoming, (",",) if is_list else tools.separators)):
                break
            try:
                yield from self._read_call(tools, is_list)
            except NoCall:
                incoming.rewind()
                return
        incoming.release()
        if is_list:
            yield from one_of(incoming, ("]",))
            yield from blanks(incoming)
        if (yield from one_of(incoming, tools.closers)):
            yield from blanks(incoming)

    def _read_call(self, tools: ToolFormat, is_list: bool) -> Reading[None]:
        incoming = self._incoming
        sink = self._sink
        if tools.syntax == "xml":
            yield from xml_call(incoming, sink)
        elif tools.syntax == "python":
            if not is_list:
                raise NoCall
            yield from python_call(incoming, sink)
        elif tools.syntax == "object" or (yield from blanks(incoming)) == "{":
            yield from object_call(incoming, sink, needs_known_name=tools.needs_known_name)
        else:
            yield from named_call(incoming, sink)
