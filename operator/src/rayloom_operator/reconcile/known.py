"""What is known of an LLMService without reading its document, of which there may be many."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Self

from rayloom_operator.names import Manifest


class Known(NamedTuple):
    uid: str
    version: int
    generation: int
    conditions: tuple[tuple[str, str], ...]  # (type, status) of each

    @classmethod
    def of(cls, document: Manifest) -> Self:
        meta = document["metadata"]
        found = tuple((each["type"], each["status"]) for each in document.get("status", {}).get("conditions", ()))
        return cls(meta["uid"], int(meta["resourceVersion"]), meta["generation"], _shared(found))


@lru_cache(maxsize=1000)
def _shared(conditions: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Most services are in the same conditions, which so are in memory once."""
    return conditions
