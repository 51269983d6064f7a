"""DeltaSink: gets a generation's deltas in the callback that decodes them, so that no task has to be woken."""

from __future__ import annotations

from typing import Protocol

from rayloom_engine.front.generation.deltas import ChoiceDelta


class EventsOfText(Protocol):
    """Makes the events of one choice, as long as the events differ in their text alone."""

    def event(self, text: str, token_ids: tuple[int, ...]) -> bytes | None:
        """Returns the event for new text of an unfinished choice.

        Returns None, without any effect, if the text needs another kind of event or several events. The caller then
        writes a delta.
        """


class DeltaSink(Protocol):
    """Receives deltas. Its methods are called in a callback of the event loop."""

    def is_open(self) -> bool:
        """False if deltas must wait now, because the client reads too slowly or is gone."""

    def part(self, delta: ChoiceDelta) -> bytes:
        """Returns the part of the body for a delta; empty if the delta has no event."""

    def framed(self, event: bytes) -> bytes:
        """Returns the part of the body for one event of `text_events`."""

    def write(self, part: bytes) -> None:
        """Writes a part. Called in the same callback as `is_open`, after the parts of other streams are made."""

    def text_events(self, index: int) -> EventsOfText | None:
        """Returns the writer of a choice's events that differ in their text alone; None if `part` must be called.

        Called after the choice's first delta. The result is used until the generation has a new warning.
        """
