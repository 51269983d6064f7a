"""Cores, memory and devices that this process may use, within the limits of its cgroups (v1 and v2)."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OOM_FILES = ("memory.events", "memory.oom_control")  # of cgroups v2 and of cgroups v1


def usable_cores() -> int:
    """Number of cores that this process may use: its affinity, limited by the lowest CPU quota of its cgroups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no such function
        cores = os.cpu_count() or 1
    for folder in _cgroup_folders("cpu"):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, max(1, math.floor(quota / period)))
    return cores


def free_memory_bytes() -> int:
    """Bytes that this process can still allocate before the machine or one of its cgroups runs out of memory."""
    free = psutil.virtual_memory().available
    for folder in _cgroup_folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit and used and limit < 1 << 60:  # v1 writes almost 2**63 for "no limit"
            # When memory is short, the kernel frees page cache that was not used lately, so count it as free.
            idle = _entry(folder / "memory.stat", "inactive_file", "total_inactive_file")
            free = min(free, limit - used + (idle or 0))
    return max(0, free)


def num_oom_kills() -> int:
    """Number of OOM kills in this process's cgroup so far; 0 if the kernel does not count them."""
    found = (_entry(folder / name, "oom_kill") for folder in _cgroup_folders("memory") for name in _OOM_FILES)
    return next((number for number in found if number is not None), 0)


def visible_devices() -> list[str]:
    """Names of the CUDA devices that this process may use: CUDA_VISIBLE_DEVICES, or all devices of the machine."""
    setting, num_present = os.environ.get("CUDA_VISIBLE_DEVICES"), len(glob.glob("/dev/nvidia[0-9]*"))
    if setting is None:
        return [str(index) for index in range(num_present)]
    return [name.strip() for name in setting.split(",") if name.strip()] if num_present else []


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's cgroup folders for a controller: the process's own folder first, the root last."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUP_ROOT  # v2
        elif controller in controllers.split(","):
            root = _CGROUP_ROOT / controller
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container, `path` may be a path of the host, which does not exist here. Then only the root is
        # returned: it is the container's cgroup.
        yield from (f for f in (folder, *folder.parents) if f.is_dir() and f.is_relative_to(root))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """Returns (quota, period) in microseconds. A quota of 0 means that there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0 if quota == "max" else int(quota)), int(period)
    except (OSError, ValueError):
        return (_number(folder / "cpu.cfs_quota_us") or 0), (_number(folder / "cpu.cfs_period_us") or 0)


def _number(path: Path) -> int | None:
    """Returns the integer in a file, or None if there is no such file or its content is "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, *names: str) -> int | None:
    """Finds the first of `names` in a file of lines "name number" and returns its number; None if there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                return int(value)
    return None
