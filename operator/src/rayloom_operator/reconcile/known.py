"""The fields of an LLMService that are read without decompressing its stored document."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Self

from rayloom_operator.names import Manifest


class Known(NamedTuple):
    """The fields of one service. `PackedDict` keeps them uncompressed beside the compressed document."""

    uid: str
    version: int  # metadata.resourceVersion
    generation: int
    conditions: tuple[tuple[str, str], ...]  # (type, status) of each condition

    @classmethod
    def of(cls, document: Manifest) -> Self:
        """Returns the fields of a document."""
        meta = document["metadata"]
        found = tuple((each["type"], each["status"]) for each in document.get("status", {}).get("conditions", ()))
        return cls(meta["uid"], int(meta["resourceVersion"]), meta["generation"], _shared(found))


@lru_cache(maxsize=1000)
def _shared(conditions: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Returns one shared tuple for equal conditions. Most services have the same conditions, so this saves memory."""
    return conditions
