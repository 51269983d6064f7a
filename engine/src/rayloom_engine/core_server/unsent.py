"""Unsent: bytes for a front that the operating system has not accepted yet, and the due time of each message."""

from __future__ import annotations

from collections import deque

# For each message, a front has the stall time plus the time that sending all unsent bytes would take at this rate. A
# front that takes longer to read the message is disconnected.
_LEAST_RATE = 2**20  # bytes per second


class Unsent:
    """The unsent bytes of one connection, oldest first. Pure: the caller passes the time."""

    def __init__(self, stall_seconds: float) -> None:
        self.num_bytes = 0
        self._stall_seconds = stall_seconds
        self._messages: deque[tuple[memoryview, float]] = deque()  # (rest of a message, due time)

    def keep(self, rest: memoryview, now: float) -> None:
        """Adds the rest of a message, which must be sent by a due time.

        If more bytes are unsent, the due time is later. So a slow but steady reader has time for a large answer.
        """
        self.num_bytes += len(rest)
        self._messages.append((rest, now + self._stall_seconds + self.num_bytes / _LEAST_RATE))

    def oldest(self) -> memoryview:
        """Returns the rest of the oldest message. There must be an unsent message."""
        return self._messages[0][0]

    def sent(self, num: int) -> None:
        """Removes the first `num` bytes of the oldest message."""
        rest, due = self._messages[0]
        self.num_bytes -= num
        if num < len(rest):
            self._messages[0] = (rest[num:], due)
        else:
            self._messages.popleft()

    def has_stalled(self, now: float) -> bool:
        """True if the oldest message is overdue. If the front reads only a part of it, the due time stays the same."""
        return bool(self._messages) and now > self._messages[0][1]

    def clear(self) -> None:
        self._messages.clear()
        self.num_bytes = 0
