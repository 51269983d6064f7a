"""TextEvents: writes the events of a choice while the events differ in their text alone."""

from __future__ import annotations

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.openai.answers.chunk_template import ChunkTemplate, encode
from rayloom_engine.text.message_parsing.sink import PlainKind


class TextEvents:
    """Implements EventsOfText for one choice.

    The object refers only to objects that an event with nothing but text needs: to the pieces of the template, for
    example, and not to the template. On a busy machine, other processes evict objects from the CPU caches between two
    tokens, and most of the CPU time of a token is spent on these cache misses.
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
