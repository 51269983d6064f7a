"""The stop signals that the server has received."""

from __future__ import annotations

import atexit
import signal
from collections import deque


def collect_stop_signals() -> deque[int]:
    """Makes SIGTERM and SIGINT append their numbers to the result, from now on, and do nothing else."""
    received: deque[int] = deque()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
        # When Python exits, it resets signal handlers to the default action, with which a late signal would kill the
        # process and replace its exit code. A signal that is ignored stays ignored.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    return received
