"""Frames between two processes of one machine, through shared memory next to their connection.

Each direction has a ring in a memory file and a pipe: the writer puts a frame into the ring, then its size into the
pipe. The pipe does two things that memory cannot. First, a reader can poll the pipe together with sockets. Second, the
kernel's lock of the pipe orders memory accesses on every processor. So a reader that has read a size sees the whole
frame of that size. Once a writer sees that a size was read, the reader has copied all earlier frames. A futex in place
of the pipe is slower from Python, as measurements have shown.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import struct
import termios
from io import FileIO

from rayloom_engine.protocol.ranks import MemoryOffer
from rayloom_engine.protocol.ring import Ring
from rayloom_engine.protocol.unnamed_files import make_memory_file, make_pipe, open_memory_file, open_pipe

_RING_BYTES = 1024 * 1024  # larger frames go over the connection
_SIZE = struct.Struct("=I")  # size 0: the frame is on the connection


class SharedMemory:
    """One process's side of the shared memory. One thread may call `send` while another thread calls `receive`.

    Raises OSError or ValueError once either side is closed.
    """

    def __init__(self, memory: FileIO, inbox: FileIO, outbox: FileIO, connection_fd: int, *, is_core: bool) -> None:
        """`connection_fd` becomes readable when the peer dies. Both pipes must be non-blocking."""
        self._file = memory  # kept open: the peer opens it through this process's /proc/PID/fd
        self._memory = mmap.mmap(memory.fileno(), 2 * _RING_BYTES)
        self._inbox = inbox
        self._outbox = outbox
        self._in_ring = Ring(_RING_BYTES)
        self._out_ring = Ring(_RING_BYTES)
        self._in_base, self._out_base = (0, _RING_BYTES) if is_core else (_RING_BYTES, 0)
        self._poller = select.poll()
        self._poller.register(inbox.fileno(), select.POLLIN)
        self._poller.register(connection_fd, select.POLLIN)

    def fileno(self) -> int:
        """Returns a descriptor that is readable if `receive` has a frame, in the memory or on the connection."""
        return self._inbox.fileno()

    def send(self, frame: bytes) -> bool:
        """Puts a frame into the ring.

        Returns False if there is no room. The peer then expects the frame on the connection, so the caller must send it
        there.
        """
        position = self._out_ring.place(len(frame))
        if position is None:
            (unread,) = _SIZE.unpack(fcntl.ioctl(self._outbox, termios.FIONREAD, bytes(_SIZE.size)))
            self._out_ring.free(unread // _SIZE.size)
            position = self._out_ring.place(len(frame))
        if position is None:
            self._out_ring.pass_by()
        else:
            begin = self._out_base + position
            self._memory[begin : begin + len(frame)] = frame
        if self._outbox.write(_SIZE.pack(0 if position is None else len(frame))) is None:
            raise ConnectionError("the peer has stopped reading")  # the pipe, with room for thousands of sizes, is full
        return position is not None

    def receive(self, timeout_s: float | None) -> bytes | None:
        """Returns the next frame; None if the next frame is on the connection. Raises TimeoutError."""
        size = self._inbox.read(_SIZE.size)
        if size is None:
            if not self._poller.poll(None if timeout_s is None else 1000 * timeout_s):
                raise TimeoutError("nothing came")
            # The poll may have returned because the peer died. The pipe is read nevertheless, because it may have
            # frames that the peer sent before its death.
            size = self._inbox.read(_SIZE.size)
        if not size:
            raise ConnectionError("connection closed")
        (num_bytes,) = _SIZE.unpack(size)
        if num_bytes == 0:
            return None
        begin = self._in_base + self._in_ring.follow(num_bytes)
        return self._memory[begin : begin + num_bytes]

    def close(self) -> None:
        for part in (self._inbox, self._outbox, self._memory, self._file):
            part.close()


def make_memory(connection_fd: int) -> tuple[SharedMemory, MemoryOffer] | None:
    """Returns the core's side and the offer for the rank; None if the system lacks such memory, or has too little."""
    try:
        file, name = make_memory_file(2 * _RING_BYTES)
        inbox = make_pipe("r", os.O_NONBLOCK)
        outbox = make_pipe("w", os.O_NONBLOCK)
        memory = SharedMemory(file, inbox, outbox, connection_fd, is_core=True)
    except OSError:
        return None
    return memory, MemoryOffer(os.getpid(), name, file.fileno(), inbox.fileno(), outbox.fileno())


def open_memory(offer: MemoryOffer, connection_fd: int) -> SharedMemory | None:
    """Returns the rank's side. None if the core runs on another machine, in another container or as another user."""
    try:
        file = open_memory_file(offer.pid, offer.memory_fd, offer.name)
        inbox = open_pipe(offer.pid, offer.to_rank_fd, "r", os.O_NONBLOCK)
        outbox = open_pipe(offer.pid, offer.to_core_fd, "w", os.O_NONBLOCK)
        return SharedMemory(file, inbox, outbox, connection_fd, is_core=False)
    except OSError:
        return None
