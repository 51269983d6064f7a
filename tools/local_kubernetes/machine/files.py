"""Files and folders shared by several commands, any of which may be killed at any moment."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_kubernetes.machine.place import REPOSITORY
from local_kubernetes.machine.shell import ClusterError, wait_until


def write_whole(path: Path, content: str) -> None:
    """Replaces the file's content atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(content)
    partial.rename(path)


def remove_folder(folder: Path) -> None:
    """Removes the folder, if it exists. Raises ClusterError while a file system is mounted in it."""
    # fields of a line: KERNEL-ID PARENT DEVICE ROOT MOUNT-POINT ...
    mount_points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if below := [one for one in mount_points if Path(one).is_relative_to(folder)]:
        raise ClusterError(f"{folder} cannot be removed before this is unmounted: {' '.join(below)}")
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def locked(path: Path, what: str, timeout_s: float) -> Iterator[None]:
    """Holds a lock for the block. The kernel releases the lock when the process ends, even after a kill.

    Raises ClusterError with the holder's name after `timeout_s`. The lock file is never removed. Otherwise two
    processes could hold locks of two different files of this name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:

        def is_ours() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        try:
            wait_until(f"the lock of {what}, held by another process", is_ours, timeout_s)
        except ClusterError as error:
            file.seek(0)
            raise ClusterError(f"{error}: {file.read().strip()}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of {REPOSITORY}\n")
        file.flush()
        yield
