"""The stop signals that the server has received."""

from __future__ import annotations

import atexit
import signal
from collections import deque


def collect_stop_signals() -> deque[int]:
    """Makes SIGTERM, SIGINT and SIGHUP append their numbers to the result, from now on, and do nothing else.

    SIGHUP is left out if it is not the first signal: a terminal that closes may send it twice, and must not end a drain
    that has begun. Under nohup, SIGHUP stays ignored.
    """
    received: deque[int] = deque()

    def receive(number: int, _: object) -> None:
        if number != signal.SIGHUP or not received:
            received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        signal.signal(number, receive)
        # When Python exits, it resets signal handlers to the default action, with which a late signal would kill the
        # process and replace its exit code. A signal that is ignored stays ignored.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    return received
