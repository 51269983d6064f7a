"""EnginesFile: the list of a gateway's engines in a JSON file, which is read again when it changes."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.front.gateway.file_watch import FileWatch
from rayloom_engine.front.gateway.gateway_config import check_place, load_gateway_document


class EnginesFile(FileWatch[dict[str, str]]):
    """A file with an object NAME -> HOST:PORT."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _engines, "the engines stay unchanged")


def _engines(path: Path) -> dict[str, str]:
    return {name: check_place(name, place) for name, place in load_gateway_document(path).items()}
