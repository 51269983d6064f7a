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

    def write(self, delta: ChoiceDelta) -> None:
        """Writes a delta. Called only while `is_open`."""

    def write_bytes(self, data: bytes) -> None:
        """Writes one event of `text_events`. Called only while `is_open`."""

    def text_events(self, index: int) -> EventsOfText | None:
        """Returns the writer of a choice's events that differ in their text alone; None if `write` must be called.

        Called after the choice's first delta. The result is used until the generation has a new warning.
        """
