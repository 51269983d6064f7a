"""Ctrl-C and its kin, turned into one exception at the places that can take it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

# SIGHUP is a closed terminal: the engine is in a session of its own and would outlive it.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Someone asked this process to end. Not an Exception, so that no handler of errors takes it for one."""


class StopSignals:
    """Inside `raising()` the first request to stop raises StopRequested; one that comes before waits for that.

    So a child that is just being started is never forgotten. A stop is never interrupted: it is bounded anyway, and
    wrappers such as `timeout` and some shells pass a Ctrl-C on that the terminal has already sent.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._raises = False

    def install(self) -> None:
        for number in _SIGNALS:
            # Started with nohup, a closed terminal is no reason to end.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A block that a request to stop leaves at once, by StopRequested; also one that came before the block."""
        self._raises = True
        try:
            if self._is_requested:
                raise StopRequested
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
        if self._raises:
            self._raises = False
            raise StopRequested
