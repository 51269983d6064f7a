"""What a run was measured on and with: the processor, how idle it was, and the versions."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """Seconds since some moments that stay the same; only differences mean anything."""

    wall_s: float
    busy_s: float  # of all cores, whoever used them
    own_s: float  # of this process and of those below it that have ended

    @staticmethod
    def read() -> CpuClock:
        machine, own = psutil.cpu_times(), os.times()
        # Time that the hypervisor gave to others is busy time too: it was not ours.
        idle = {"idle", "iowait", "guest", "guest_nice"}  # guest time is counted in user and nice already
        return CpuClock(
            wall_s=time.perf_counter(),
            busy_s=sum(seconds for name, seconds in machine._asdict().items() if name not in idle),
            own_s=own.user + own.system + own.children_user + own.children_system,
        )


def others_percent(before: CpuClock, after: CpuClock, num_cores: int) -> float:
    """Share of the machine, 0 to 100, that processes other than ours kept busy between two readings."""
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return 100 * max(0.0, others_s) / ((after.wall_s - before.wall_s) * num_cores)


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as the system names it, or its architecture where it does not."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def busy_percent() -> float:
    """Share of all cores that was busy during the last moment, 0 to 100. Takes BUSY_SAMPLE_S seconds."""
    return psutil.cpu_percent(interval=BUSY_SAMPLE_S)


def package_versions() -> dict[str, str]:
    """Versions of Python, of this engine and of the packages that a result depends on, where they are installed."""
    versions = {"python": platform.python_version(), "rayloom-engine": __version__}
    for name in NAMED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
