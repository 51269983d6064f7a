"""The two clocks that decisions use, and the format of times in Kubernetes objects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Now:
    """The current time on both clocks. Decisions get this time as an argument and read no clock themselves."""

    wall: datetime  # date and time with a time zone; comparable with the times in Kubernetes objects
    mono: float  # seconds of the event loop's clock; comparable with the arrival times of engines' answers


def moment(text: str) -> datetime:
    """Parses a time of a Kubernetes object. An empty text is the beginning of 1970."""
    return datetime.fromisoformat(text or "1970-01-01T00:00:00Z")


def stamp(time: datetime) -> str:
    """Formats a time for a Kubernetes object: in UTC, to the second."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
