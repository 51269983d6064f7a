"""The machine of a run: its processor, how busy it is, and the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayloom_engine import __version__

NAMED_PACKAGES = ("torch", "transformers")
BUSY_SAMPLE_S = 0.5
BUSY_WARNING_PERCENT = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """Counters of seconds.

    Only the difference of two readings has a meaning, because each counter starts at an unknown time.
    """

    wall_s: float
    busy_s: float  # CPU seconds of all cores, by any process
    own_s: float  # CPU seconds of this process and of its descendants that have ended

    @staticmethod
    def read() -> CpuClock:
        machine = psutil.cpu_times()
        own = os.times()
        # `steal`, the time that the hypervisor gave to other machines, counts as busy, because this machine could not
        # use it.
        idle = {"idle", "iowait", "guest", "guest_nice"}  # guest time is already a part of user and nice
        return CpuClock(
            wall_s=time.perf_counter(),
            busy_s=sum(seconds for name, seconds in machine._asdict().items() if name not in idle),
            own_s=own.user + own.system + own.children_user + own.children_system,
        )


def others_percent(before: CpuClock, after: CpuClock, num_cores: int) -> float:
    """Percentage of the machine's CPU time, 0 to 100, that other processes used between two readings."""
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return 100 * max(0.0, others_s) / ((after.wall_s - before.wall_s) * num_cores)


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name that the system gives the processor, or the architecture if the system gives no name."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def busy_percent() -> float:
    """Busy share of all cores together, in percent (0 to 100), measured during the next BUSY_SAMPLE_S seconds."""
    return psutil.cpu_percent(interval=BUSY_SAMPLE_S)


def package_versions() -> dict[str, str]:
    """Versions of Python, of the engine and of the installed packages that affect results."""
    versions = {"python": platform.python_version(), "rayloom-engine": __version__}
    for name in NAMED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
