"""The two clocks of a decision, and times as documents hold them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Now:
    """The same moment on both clocks. A decision takes it as an argument and reads no clock itself."""

    wall: datetime  # time of day, with a time zone; comparable with the times in documents
    mono: float  # seconds of the event loop's clock; comparable with the times of an engine's answers


def moment(text: str) -> datetime:
    """The time in a document; 1970 for an empty text."""
    return datetime.fromisoformat(text or "1970-01-01T00:00:00Z")


def stamp(time: datetime) -> str:
    """The text of a time for a document, to the second, in UTC."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
