"""How the long parts of a start (resolve, convert, load) tell how far they are."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, so it must be cheap. `phase` is "resolve", "convert" or "load"; `done` of `total` are in `unit`.

    `total` 0 means that the amount is not known.
    """

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None: ...


def no_progress(phase: str, done: int, total: int, unit: str) -> None:
    """Tells nobody."""
