"""Log lines that a hostile peer can cause at will: kept rare, so that they do not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

MAX_PROBLEMS = 64  # that OncePerProblem remembers


class RareLines(logging.Filter):
    """Lets one record a second through of each of `messages`, with the number of those it held back before."""

    def __init__(
        self, messages: Collection[str], every_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._next_s = dict.fromkeys(messages, float("-inf"))
        self._num_held = dict.fromkeys(messages, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.msg
        if not isinstance(message, str) or message not in self._next_s:
            return True
        now = self._clock()
        if now < self._next_s[message]:
            self._num_held[message] += 1
            return False
        self._next_s[message] = now + self._every_s
        if self._num_held[message]:
            record.msg = f"{message} ({self._num_held[message]} more since the last such line)"
            self._num_held[message] = 0
        return True


class OncePerProblem:
    """Says of each problem once that it is new."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def is_new(self, problem: str) -> bool:
        """True the first time; again when MAX_PROBLEMS others came since, or after `solved`."""
        if problem in self._known:
            return False
        self._known[problem] = None
        if len(self._known) > MAX_PROBLEMS:
            del self._known[next(iter(self._known))]
        return True

    def solved(self) -> None:
        """Forgets all problems."""
        self._known.clear()
