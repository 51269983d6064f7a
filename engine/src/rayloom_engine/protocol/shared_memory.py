"""Frames between two processes of one machine, through shared memory beside the connection that they have.

Each direction is a ring in a memory file and a pipe: the writer puts a frame into the ring, then its size into the
pipe. The pipe gives what memory alone does not. Its reader can wait for it together with sockets. And its lock orders
memory on every processor: whoever has read a size sees that frame whole, and a writer that sees a size taken knows that
the frame before it was copied out. A futex in place of the pipe was measured and is slower from Python.

Memory and pipes have no names in any file system: nothing is left of processes that are killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import struct
import termios
from io import FileIO

from rayloom_engine.protocol.ranks import MemoryOffer
from rayloom_engine.protocol.ring import Ring

_RING_BYTES = 1024 * 1024  # what does not fit goes over the connection
_SIZE = struct.Struct("=I")  # 0 = the frame is on the connection


class SharedMemory:
    """One end. A thread may send while another receives. Raises OSError or ValueError once an end is closed."""

    def __init__(self, memory: FileIO, inbox: FileIO, outbox: FileIO, connection_fd: int, *, is_core: bool) -> None:
        """`connection_fd` tells of the peer's end; neither pipe may block."""
        self._file = memory  # the peer opens it through this process
        self._memory = mmap.mmap(memory.fileno(), 2 * _RING_BYTES)
        self._inbox, self._outbox = inbox, outbox
        self._in_ring, self._out_ring = Ring(_RING_BYTES), Ring(_RING_BYTES)
        self._in_base, self._out_base = (0, _RING_BYTES) if is_core else (_RING_BYTES, 0)
        self._poller = select.poll()
        self._poller.register(inbox.fileno(), select.POLLIN)
        self._poller.register(connection_fd, select.POLLIN)

    def fileno(self) -> int:
        """Readable when a frame is there, here or on the connection."""
        return self._inbox.fileno()

    def send(self, frame: bytes) -> bool:
        """False: there is no room, and the peer has been told to read this frame from the connection."""
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
            raise ConnectionError("the peer has stopped reading")  # thousands of frames ago
        return position is not None

    def receive(self, timeout_s: float | None) -> bytes | None:
        """The next frame; None when it is on the connection. Raises TimeoutError."""
        size = self._inbox.read(_SIZE.size)
        if size is None:
            if not self._poller.poll(None if timeout_s is None else 1000 * timeout_s):
                raise TimeoutError("nothing came")
            # Also when it was the connection that woke: what the peer said before its end comes first.
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
    """The core's end, and how the rank finds it; None where the system has no such memory."""
    if not hasattr(os, "memfd_create"):  # Linux alone has it
        return None
    name = f"rayloom-{secrets.token_hex(16)}"
    try:
        file = FileIO(os.memfd_create(name), "r+")
        file.truncate(2 * _RING_BYTES)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        inbox, outbox = (FileIO(_own_end(os.pipe2(flags), index), mode) for index, mode in ((0, "r"), (1, "w")))
        memory = SharedMemory(file, inbox, outbox, connection_fd, is_core=True)
    except OSError:  # out of descriptors or memory
        return None
    return memory, MemoryOffer(os.getpid(), name, file.fileno(), inbox.fileno(), outbox.fileno())


def open_memory(offer: MemoryOffer, connection_fd: int) -> SharedMemory | None:
    """The rank's end; None when it belongs to another machine, container or user, whose processes are not ours to open.

    Only the process that made the offer has a file of this name, so its other descriptors are the pipes.
    """
    folder = f"/proc/{offer.pid}/fd"
    try:
        if os.readlink(f"{folder}/{offer.memory_fd}") != f"/memfd:{offer.name} (deleted)":
            return None
        file = FileIO(os.open(f"{folder}/{offer.memory_fd}", os.O_RDWR), "r+")
        inbox = FileIO(os.open(f"{folder}/{offer.to_rank_fd}", os.O_RDONLY | os.O_NONBLOCK), "r")
        outbox = FileIO(os.open(f"{folder}/{offer.to_core_fd}", os.O_WRONLY | os.O_NONBLOCK), "w")
        return SharedMemory(file, inbox, outbox, connection_fd, is_core=False)
    except OSError:
        return None


def _own_end(pipe: tuple[int, int], index: int) -> int:
    """The other end is the peer's alone: then each sees the other's end in the pipe too."""
    os.close(pipe[1 - index])
    return pipe[index]
