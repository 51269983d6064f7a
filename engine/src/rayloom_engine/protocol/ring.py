"""Where messages lie in a ring of bytes. Pure: the writer and the reader of a ring do the same arithmetic."""

from __future__ import annotations

from collections import deque


class Ring:
    """Positions in [0, capacity). A message lies in one piece; what is too short at the end for it is left out."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._taken: deque[int] = deque()  # writer: bytes held by each message that may still be read, oldest first
        self._num_taken_bytes = 0

    def follow(self, size: int) -> int:
        """Reader: the position of the next message, which has `size` bytes."""
        begin = self._next if self._next + size <= self._capacity else 0
        self._next = begin + size
        return begin

    def place(self, size: int) -> int | None:
        """Writer: the position for a message of `size` bytes; None when there is no room that it knows of."""
        skipped = 0 if self._next + size <= self._capacity else self._capacity - self._next
        if self._num_taken_bytes + skipped + size > self._capacity:
            return None
        self._taken.append(skipped + size)
        self._num_taken_bytes += skipped + size
        return self.follow(size)

    def pass_by(self) -> None:
        """Writer: a message goes another way, and is counted in its turn."""
        self._taken.append(0)

    def free(self, num_unread: int) -> None:
        """Writer: the reader has begun to read all messages but so many. The one before these may be half read."""
        while len(self._taken) > num_unread + 1:
            self._num_taken_bytes -= self._taken.popleft()
