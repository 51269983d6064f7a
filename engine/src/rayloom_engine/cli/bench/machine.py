"""What a run was measured on and with: the processor, how idle it was, and the versions."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import psutil

from rayloom_engine import __version__

NAMED_PACKAGES = ("torch", "transformers")
BUSY_SAMPLE_S = 0.5


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
