"""DeltaSink: takes a generation's deltas at once, so that no task has to be woken for them."""

from __future__ import annotations

from typing import Protocol

from rayloom_engine.front.generation.deltas import ChoiceDelta


class DeltaSink(Protocol):
    """Its methods are called in a callback of the event loop."""

    def is_open(self) -> bool:
        """False if deltas must wait now, because the client reads too slowly or is gone."""

    def write(self, delta: ChoiceDelta) -> None:
        """Writes a delta. Called only while `is_open`."""
