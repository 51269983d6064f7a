"""HostFile: memory for copies of KV blocks that outlives the process which uses it.

The memory is a file in /dev/shm, which a process that replaces a dead one opens again by its name. The name has a part
of a hash of the engine's token, so no other engine has the same. A header says what the memory is for; a process that
needs it for something else makes a new file. Every file has a random id, so its users notice if it is a new one.

Linux frees such a file only when it is removed. The engine removes its files when it ends. If an engine was killed, the
next engine on the machine removes the files. It recognises them by their locks, which end with their processes: a file
is stale if neither the file itself nor the file of its engine's supervisor is locked. Machines without the supervisor
have no file of it. There an unlocked file may belong to a rank that is being restarted, so it is stale only after half
an hour. A process updates the modification time of its file every 15 s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER = Path("/dev/shm")
_PREFIX = "rayloom-kv-"
SUPERVISOR = "engine"  # owner of the file that a supervisor has locked as long as its engine lives
_HEADER_BYTES = 4096
_RENEW_SECONDS = 15.0
# Age at which a file without a lock belongs to a dead engine. A living one has replaced a dead rank by then.
_STALE_SECONDS = 1800.0
# The same while another engine has too little memory. By then a rank without a core has ended: the age is more than
# its ORPHAN_SECONDS (30) and _RENEW_SECONDS together. A rank that is started again and needs longer loses its copies.
_SHORT_STALE_SECONDS = 75.0
_LOCK_SECONDS = 3.0  # for which a process waits until its predecessor has died


class HostFile:
    """`memory`: zeros in a new file, or what earlier processes have left in it."""

    def __init__(self, descriptor: int | None, path: Path | None, file_id: str, memory: memoryview) -> None:
        """Use `open` instead. Without a path the memory ends with the process."""
        self.id = file_id
        self.memory = memory
        self._path = path
        self._descriptor = descriptor  # kept open for its lock
        self._is_closed = threading.Event()
        self._renewer: threading.Thread | None = None
        if descriptor is not None:
            self._renewer = threading.Thread(target=self._renew, args=(descriptor,), name="host-file", daemon=True)
            self._renewer.start()

    @classmethod
    def open(cls, name: str | None, purpose: str, num_bytes: int, folder: Path = FOLDER) -> HostFile:
        """Opens the file of this name, or makes a new file if there is none for this purpose and of this size.

        All memory of a new file is allocated at once: a page that cannot be allocated later would end the process. With
        the name None, or on a system without the folder, the memory belongs to this process alone. Raises OSError.
        """
        if name is None or not folder.is_dir():
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            return cls(None, None, secrets.token_hex(16), memoryview(mmap.mmap(-1, num_bytes, flags=flags)))
        path = folder / name
        digest = hashlib.sha256(purpose.encode()).hexdigest()  # the purpose may be longer than the header
        found = _reopened(path, digest, num_bytes)
        if found is None:
            remove_stale_files(folder)
            found = _created(path, digest, num_bytes)
        descriptor, file_id = found
        try:
            mapping = mmap.mmap(descriptor, _HEADER_BYTES + num_bytes)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)  # its process continues without it, so its content would be out of date
            raise
        return cls(descriptor, path, file_id, memoryview(mapping)[_HEADER_BYTES:])

    def close(self) -> None:
        """Lets other processes open the file. Its memory stays valid as long as an object refers to it."""
        self._is_closed.set()
        if self._renewer is not None and self._descriptor is not None:
            self._renewer.join()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping has a duplicate of the descriptor
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Removes the file's name. The memory is freed when no object refers to it."""
        if self._path is not None and self._descriptor is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                    self._path.unlink()
        self.close()

    def _renew(self, descriptor: int) -> None:
        """Updates the modification time of the file until the file is closed."""
        while True:
            with contextlib.suppress(OSError):
                os.utime(descriptor)
            if self._is_closed.wait(_RENEW_SECONDS):
                return


def file_name(token: str, owner: str) -> str:
    """Returns the name of the file of a process. `token`: the engine's. `owner`: the process's name in its engine."""
    return f"{_engine_prefix(token)}{owner}"


def remove_files(token: str, folder: Path = FOLDER) -> None:
    """Removes all files of an engine that has ended."""
    for path in folder.glob(f"{_engine_prefix(token)}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def allocated_bytes(token: str | None, folder: Path = FOLDER) -> int:
    """Returns the bytes that the files of an engine take on this machine; with None, those of all engines."""
    total = 0
    for path in folder.glob(f"{_PREFIX if token is None else _engine_prefix(token)}*"):
        with contextlib.suppress(OSError):
            total += 512 * path.lstat().st_blocks
    return total


def remove_stale_files(folder: Path = FOLDER, *, token_without_room: str | None = None) -> int:
    """Removes this user's files of engines that were killed. Returns how many.

    `token_without_room`: the token of an engine that has no room for its own files. For other engines' files, a shorter
    age is enough then.
    """
    num_removed = 0
    for path in [path for path in folder.glob(f"{_PREFIX}*") if _seconds_to_stale(path, token_without_room) <= 0]:
        with contextlib.suppress(OSError):
            descriptor = _locked(path)
            try:
                path.unlink()
            finally:
                os.close(descriptor)
            num_removed += 1
            logger.info("removed %s, which an engine has left behind", path)
    return num_removed


def seconds_to_room(token: str, folder: Path = FOLDER) -> float | None:
    """Returns how soon `remove_stale_files` can make room for an engine that is short of it.

    None: there is no file that it may remove.
    """
    found = []
    for path in folder.glob(f"{_PREFIX}*"):
        if not path.name.startswith(_engine_prefix(token)):
            with contextlib.suppress(OSError):
                os.close(_locked(path))
                found.append(max(0.0, _seconds_to_stale(path, token)))
    return min((seconds for seconds in found if math.isfinite(seconds)), default=None)


def _seconds_to_stale(path: Path, token_without_room: str | None) -> float:
    """Returns after how many seconds a file that nobody uses is stale; infinite if its engine lives."""
    supervisor = path.with_name(f"{path.name.rpartition('-')[0]}-{SUPERVISOR}")
    is_other = token_without_room is not None and not path.name.startswith(_engine_prefix(token_without_room))
    try:
        if supervisor.exists():
            os.close(_locked(supervisor))
            return 0.0
        age = max(0.0, time.time() - path.lstat().st_mtime)  # the clock may have been set back
        return (_SHORT_STALE_SECONDS if is_other else _STALE_SECONDS) - age
    except OSError:  # the supervisor has the lock, or the file is gone
        return math.inf


def _engine_prefix(token: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(f'host memory of {token}'.encode()).hexdigest()[:16]}-"


def _reopened(path: Path, purpose_digest: str, num_bytes: int) -> tuple[int, str] | None:
    """Returns (descriptor, id) of a file that is there, for this purpose and of this size; None if there is none."""
    try:
        # A process that dies needs time to release its lock. A new file beside the locked one would take the memory
        # twice.
        descriptor = _soon(lambda: _locked(path))
    except OSError:  # there is none, or another process still has the lock
        return None
    try:
        found = json.loads(os.pread(descriptor, _HEADER_BYTES, 0).rstrip(b"\0"))
        is_same = (found["purpose"], found["num_bytes"]) == (purpose_digest, num_bytes)
        if is_same and os.fstat(descriptor).st_size == _HEADER_BYTES + num_bytes:
            return descriptor, str(found["id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # its process has died while it wrote the header
    os.close(descriptor)
    return None


def _created(path: Path, purpose_digest: str, num_bytes: int) -> tuple[int, str]:
    """Makes a file in place of the present one. Returns (descriptor, id)."""
    descriptor = _soon(lambda: _new_file(path))
    try:
        os.posix_fallocate(descriptor, 0, _HEADER_BYTES + num_bytes)
        header = {"purpose": purpose_digest, "num_bytes": num_bytes, "id": secrets.token_hex(16)}
        os.pwrite(descriptor, json.dumps(header).encode(), 0)
        return descriptor, str(header["id"])
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def _new_file(path: Path) -> int:
    """Makes an empty file in place of the present one, and locks it.

    Raises BlockingIOError if another engine, which looks for stale files, was faster: it has the lock, or has removed
    the file.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, path)
    except FileNotFoundError as error:
        raise BlockingIOError(error.errno, str(error)) from error
    return descriptor


def _soon(lock: Callable[[], T]) -> T:
    """Calls `lock` again for a few seconds if another process has the lock."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return lock()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        sleep(0.02)


def _locked(path: Path) -> int:
    """Opens and locks a file of this user that nobody else may read. Raises OSError if it is not one, or is locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{path} is not a private file of this user")
    _lock(descriptor, path)
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Locks the file. If this fails, closes it and raises OSError: FileNotFoundError if it has lost its path."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            raise FileNotFoundError(errno.ENOENT, "removed by the process that had locked it", str(path))
    except OSError:
        os.close(descriptor)
        raise
