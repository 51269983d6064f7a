"""Positions of messages in a ring of bytes. Pure: writer and reader of a ring do the same arithmetic."""

from __future__ import annotations

from collections import deque


class Ring:
    """Positions in [0, capacity). A message lies in one piece: a rest at the end that is too short is skipped."""

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
        """Writer: the position for a message of `size` bytes; None when the ring may be full."""
        skipped = 0 if self._next + size <= self._capacity else self._capacity - self._next
        if self._num_taken_bytes + skipped + size > self._capacity:
            return None
        self._taken.append(skipped + size)
        self._num_taken_bytes += skipped + size
        return self.follow(size)

    def pass_by(self) -> None:
        """Writer: counts a message that is sent over the connection instead, without room in the ring."""
        self._taken.append(0)

    def free(self, num_unread: int) -> None:
        """Writer: frees messages that were read. All but `num_unread` have been begun; the last of these is kept."""
        while len(self._taken) > num_unread + 1:
            self._num_taken_bytes -= self._taken.popleft()
