"""StopSignals: SIGINT, SIGTERM and SIGHUP end `rayloom-operator local`."""

from __future__ import annotations

import atexit
import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

# SIGHUP is included: an engine has its own session, so a closed terminal alone does not end the engine.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Wrappers such as `timeout` and some shells repeat the terminal's Ctrl-C at once. A user who presses Ctrl-C again needs
# longer.
_REPEAT_S = 0.5


class StopRequested(BaseException):
    """A stop signal arrived. Not an Exception, so that no error handler catches it."""


class StopSignals:
    """Raises StopRequested inside `raising()` when the first stop signal arrives, or on entry if it arrived before.

    A signal outside `raising()` raises nothing before the next entry, so it cannot interrupt the start of a child
    process. After an interrupted start, the child could keep running. Later signals raise nothing. Later signals set
    `is_urgent`, unless a wrapper repeats the first signal.
    """

    def __init__(self) -> None:
        self.is_urgent = False
        self._first_at: float | None = None  # time.monotonic of the first signal
        self._raises = False

    def install(self) -> None:
        for number in _SIGNALS:
            # nohup makes a process ignore SIGHUP. SIGHUP stays ignored, so that the engine outlives the terminal.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._on_signal)
            # When Python exits, it resets signal handlers to the default action, with which a late signal would kill
            # the process and replace its exit code. A signal that is ignored stays ignored.
            atexit.register(signal.signal, number, signal.SIG_IGN)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside this context a stop signal raises StopRequested. The entry raises it if a signal came earlier."""
        self._raises = True
        try:
            if self._first_at is not None:
                raise StopRequested
            yield
        finally:
            self._raises = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delays the exception of a signal inside this context until the context ends. Used inside `raising()`."""
        self._raises = False
        yield
        self._raises = True
        if self._first_at is not None:
            self._raises = False
            raise StopRequested

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        self.is_urgent = now - self._first_at > _REPEAT_S
        if self._raises:
            self._raises = False
            raise StopRequested
