"""Memory files and pipes without a name: other processes of this machine open them through /proc/PID/fd.

The kernel frees them when the processes end, even by SIGKILL. Another process can open them only on the same Linux
machine, as the same user and in the same process namespace. So processes in other containers cannot open them. All
functions raise OSError.
"""

from __future__ import annotations

import os
import secrets
from io import FileIO


def make_memory_file(num_bytes: int) -> tuple[FileIO, str]:
    """Returns a file of zeros, and the random name by which other processes recognise it."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files")
    name = f"rayloom-{secrets.token_hex(16)}"
    file = FileIO(os.memfd_create(name), "r+")
    file.truncate(num_bytes)
    return file, name


def open_memory_file(pid: int, fd: int, name: str) -> FileIO:
    """Opens another process's file.

    Only the process that made the file knows its random name. If the name matches, the descriptors that were sent with
    this name are genuine.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"process {pid} is not the one that made {name}")
    return FileIO(os.open(path, os.O_RDWR), "r+")


def make_pipe(mode: str, flags: int = 0) -> FileIO:
    """Returns this process's end of a new pipe, "r" or "w".

    Only the peer opens the other end, so each process notices the death of the other.
    """
    ends = os.pipe2(os.O_CLOEXEC | flags)
    os.close(ends[mode == "r"])
    return FileIO(ends[mode == "w"], mode)


def open_pipe(pid: int, fd: int, mode: str, flags: int = 0) -> FileIO:
    """Opens the other end of a peer's pipe."""
    return FileIO(os.open(f"/proc/{pid}/fd/{fd}", (os.O_WRONLY if mode == "w" else os.O_RDONLY) | flags), mode)
