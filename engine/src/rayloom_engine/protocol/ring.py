"""The positions of messages in a ring of bytes. Pure: writer and reader each compute the positions on their own."""

from __future__ import annotations

from collections import deque


class Ring:
    """The positions of messages in a ring buffer of `capacity` bytes, for its writer or for its reader.

    A message is never split. If the space before the end of the buffer is too short, the message skips this space.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0
        self._taken: deque[int] = deque()  # writer: bytes of each message that may still be read, oldest first
        self._num_taken_bytes = 0

    def follow(self, size: int) -> int:
        """Reader: returns the position of the next message, which has `size` bytes."""
        begin = self._next if self._next + size <= self._capacity else 0
        self._next = begin + size
        return begin

    def place(self, size: int) -> int | None:
        """Writer: returns the position for a message of `size` bytes, or None if the ring may be full."""
        skipped = 0 if self._next + size <= self._capacity else self._capacity - self._next
        if self._num_taken_bytes + skipped + size > self._capacity:
            return None
        self._taken.append(skipped + size)
        self._num_taken_bytes += skipped + size
        return self.follow(size)

    def pass_by(self) -> None:
        """Writer: counts a message that does not fit the ring and is sent over the connection instead."""
        self._taken.append(0)

    def free(self, num_unread: int) -> None:
        """Writer: frees the space of messages that were read.

        `num_unread`: number of messages that the reader has not begun to read. The newest message that the reader has
        begun to read keeps its space, because the reader may still read it.
        """
        while len(self._taken) > num_unread + 1:
            self._num_taken_bytes -= self._taken.popleft()
