"""Servers that several test files use: a server starts with the first of its files and ends with the last.

The files of a server run in one process of `make test`, one after the other. Otherwise each process would start a
server of its own. A server ends after its last file, because an idle server takes a second or two of CPU time a minute.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests/conftest.py imports this file, also in environments without the modules that servers need
    from rt_server import RunningServer

# fixture of tests/engine_real/conftest.py -> the files that use it
FILES = {
    "server": {
        "test_agent_clients",
        "test_openai_client",
        "test_published_schema",
        "test_repeats",
        "test_structured_outputs",
        "test_tools",
        "test_without_torch",
    },
    "one_rank": {"test_core_death", "test_external", "test_rank_death", "test_ray_faults", "test_tensor_parallel"},
}


@functools.cache
def scope_of(file: str) -> str:
    """The name of the server that a test file shares with other files. For any other file: `file` itself."""
    return next((name for name, files in FILES.items() if Path(file).stem in files), file)


class SharedServer:
    """One server of `FILES`."""

    def __init__(
        self, name: str, start: Callable[[], contextlib.AbstractContextManager[RunningServer]], files: Iterable[Path]
    ) -> None:
        """`files`: the files of all tests of this run."""
        self._name = name
        self._start = start
        self._stack = contextlib.ExitStack()
        self._running: RunningServer | None = None
        self._waiting = FILES[name] & {file.stem for file in files}

    @contextlib.contextmanager
    def used_by(self, file: Path) -> Iterator[RunningServer]:
        """The server, during the tests of `file`."""
        assert file.stem in FILES[self._name], f"name {file.stem} in FILES of {__file__}"
        if self._running is None:
            self._running = self._stack.enter_context(self._start())
        try:
            yield self._running
        finally:
            self._waiting.discard(file.stem)
            if not self._waiting:
                self.close()

    def close(self) -> None:
        """Ends the server if it runs."""
        self._running = None
        self._stack.close()
