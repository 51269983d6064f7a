"""TextEvents: writes the events of a choice while the events differ in their text alone."""

from __future__ import annotations

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate, encode
from rayloom_engine.text.message_parsing.sink import PlainKind


class TextEvents:
    """Implements EventsOfText for one choice.

    This object refers only to the objects that an event with nothing but text needs. On a busy machine, other
    processes displace memory from the processor's caches, and reading this memory again takes most of the time for
    a token. So the object has the pieces of the template, and not the template.
    """

    __slots__ = ("_count", "_kind", "_pieces", "_reads")

    def __init__(self, template: ChunkTemplate, reader: ChoiceReader, kind: PlainKind) -> None:
        self._pieces = template.pieces
        self._reads = reader.reads
        self._count = reader.count if reader.is_counting else None
        self._kind = kind

    def event(self, text: str, token_ids: tuple[int, ...]) -> bytes | None:
        if not self._reads(text, self._kind):
            return None
        if self._count is not None:
            self._count(text, token_ids)
        return encode(text).join(self._pieces)


class UnparsedTextEvents:
    """Implements EventsOfText for a choice whose text is not parsed into parts."""

    __slots__ = ("_template",)

    def __init__(self, template: ChunkTemplate) -> None:
        self._template = template

    def event(self, text: str, token_ids: tuple[int, ...]) -> bytes | None:
        return self._template.filled(text) if text else None
