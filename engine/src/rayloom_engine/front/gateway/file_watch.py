"""FileWatch: reads a file again when it changes. Kubernetes replaces the files of a ConfigMap or Secret as a whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from rayloom_engine.errors import ConfigError

CHECK_S = 0.5

logger = logging.getLogger(__name__)

Content = TypeVar("Content")


class FileWatch(Generic[Content]):
    """Watches one file by its modification time, inode and size. For one event loop."""

    def __init__(self, path: Path, parse: Callable[[Path], Content], consequence: str) -> None:
        """`parse` returns the content of the file or raises ConfigError.

        `consequence`: the effect of a broken file, as the log names it, such as "the engines stay unchanged".
        """
        self._path = path
        self._parse = parse
        self._consequence = consequence
        self._stamp: tuple[int, int, int] | None = None
        self.problem = ""  # why the present content of the file is not in use; empty if it is in use

    def read(self) -> Content:
        """Returns the content. Raises ConfigError."""
        self._stamp = self._current_stamp()
        return self._parse(self._path)

    async def watch(self, on_change: Callable[[Content], None]) -> None:
        """Calls `on_change` with the content whenever the file has changed. A broken file changes nothing.

        `on_change` may raise ConfigError for content that cannot be used now, for example because a disk is full. The
        file is then read again at every check until it can be used; its problem is logged once.
        """
        logged: tuple[object, str] | None = None
        while True:
            await asyncio.sleep(CHECK_S)
            stamp = self._current_stamp()
            if stamp == self._stamp:
                logged = None
                self.problem = ""
                continue
            try:
                on_change(self._parse(self._path))
                self._stamp = stamp  # set only after success, to the stamp from before the file was read
                self.problem = ""
            except ConfigError as error:
                if logged != (stamp, str(error)):
                    logger.error("%s: %s", self._consequence, error)
                logged = (stamp, str(error))
                self.problem = str(error)

    def _current_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
