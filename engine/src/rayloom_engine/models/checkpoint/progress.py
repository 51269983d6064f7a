"""Progress: the callback by which the long parts of a start (resolve, convert, load) report their progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback that is called often, so it must be cheap.

    `phase` is a phase of the start, such as "load". `done` and `total` count in `unit`. A `total` of 0 means unknown.
    """

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None: ...


def no_progress(phase: str, done: int, total: int, unit: str) -> None:
    """A Progress that does nothing."""
