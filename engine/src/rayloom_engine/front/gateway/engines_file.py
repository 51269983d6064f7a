"""EnginesFile: the list of a gateway's engines in a JSON file, which is read again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.gateway_config import check_place, load_gateway_document

CHECK_S = 0.5

logger = logging.getLogger(__name__)


class EnginesFile:
    """A file with an object NAME -> HOST:PORT. Kubernetes replaces such a file (of a ConfigMap) as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def read(self) -> dict[str, str]:
        """Returns the engines in the file. Raises ConfigError."""
        self._stamp = self._current_stamp()
        document = load_gateway_document(self._path)
        return {name: check_place(name, place) for name, place in document.items()}

    async def watch(self, on_change: Callable[[Mapping[str, str]], None]) -> None:
        """Calls `on_change` with the engines whenever the file has changed. A broken file changes nothing."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._current_stamp() == self._stamp:
                continue
            try:
                on_change(self.read())
            except ConfigError as error:
                logger.error("the list of engines stays as it was: %s", error)

    def _current_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
