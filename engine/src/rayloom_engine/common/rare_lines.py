"""Limits log lines that a hostile peer could cause at a high rate, so that they do not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

MAX_PROBLEMS = 64  # number of problems that OncePerProblem remembers


class RareLines(logging.Filter):
    """Passes one log record in `every_s` seconds for each of `messages`, and adds the number of dropped records."""

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
    """Remembers problems, so that each problem is logged once."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def is_new(self, problem: str) -> bool:
        """Returns True if `problem` is new or forgotten.

        A problem is forgotten after MAX_PROBLEMS other problems, and at a call of `solved`.
        """
        if problem in self._known:
            return False
        self._known[problem] = None
        if len(self._known) > MAX_PROBLEMS:
            del self._known[next(iter(self._known))]
        return True

    def solved(self) -> None:
        """Forgets all problems."""
        self._known.clear()
