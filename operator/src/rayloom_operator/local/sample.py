"""SampleRequest: the sample request of a local run, in a thread beside the loop that watches the processes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

ShowAnswer = Callable[[Callable[[socket.socket], None]], None]

# seconds for the whole answer: enough for 64 tokens on a slow CPU, or for a restart of the engine
SAMPLE_LIMIT_S = 120.0
_END_S = 1.0  # seconds for a cancelled sample to end


class SampleRequest:
    """Runs `show` in a daemon thread for a limited time. Errors of `show` are printed, and do not end the run.

    `show` prints the answer to the sample request, and calls its argument with the socket of the request.
    """

    def __init__(self, show: ShowAnswer, then: Callable[[], None], limit_s: float = SAMPLE_LIMIT_S) -> None:
        """`then` is called once the sample has ended, unless it was cancelled."""
        self._show = show
        self._then = then
        self._limit_s = limit_s
        self._thread = threading.Thread(target=self._run, name="sample", daemon=True)
        self._timer = threading.Timer(limit_s, self._end_late)
        self._timer.daemon = True
        self._socket: socket.socket | None = None
        self._is_ended = False
        self._is_cancelled = False

    def start(self) -> None:
        self._timer.start()
        self._thread.start()

    def cancel(self) -> None:
        """Breaks the connection of the request, and waits a short time for the thread to end. May be called several
        times."""
        self._is_cancelled = True
        self._timer.cancel()
        self._break()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._show(self._hold)
        except Exception as error:  # noqa: BLE001 - no fault of the sample may end the run
            print(f"\nThe sample request failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._timer.cancel()
        if not self._is_cancelled:
            self._then()

    def _hold(self, connection: socket.socket) -> None:
        self._socket = connection
        if self._is_ended or self._is_cancelled:
            self._break()

    def _end_late(self) -> None:
        self._is_ended = True
        print(
            f"\nThe sample request takes longer than {self._limit_s:.0f} s and is ended.", file=sys.stderr, flush=True
        )
        self._break()

    def _break(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the connection may have ended meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)
