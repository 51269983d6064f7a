"""Finds and installs missing Debian packages of the local cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from local_kubernetes.machine.files import locked
from local_kubernetes.machine.place import cache_folder
from local_kubernetes.machine.shell import ClusterError, run_shown, stage

# A program or file -> the package that provides it.
_NODES = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "nsenter": "util-linux",
    "sysctl": "procps",
}
_IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
_ALWAYS = {"openssl": "openssl"}


def ensure_packages(*, nodes: bool, images: bool) -> None:
    """Installs missing packages as root. Raises ClusterError with their names if they cannot be installed."""
    wanted = _ALWAYS | (_NODES if nodes else {}) | (_IMAGES if images else {})
    if not _missing(wanted):
        return
    # Two commands of one run may start at the same time, but apt-get refuses to run twice at a time.
    with locked(cache_folder() / ".packages.lock", "installing packages", 900):
        if missing := _missing(wanted):
            _install(missing)


def _missing(wanted: Mapping[str, str]) -> list[str]:
    """The packages of the programs and files in `wanted` that this machine lacks."""
    return sorted({package for program, package in wanted.items() if not _exists(program)})


def _install(missing: list[str]) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        command = f"apt-get install --no-install-recommends {' '.join(missing)}"
        raise ClusterError(f"missing: {', '.join(missing)}. As root: {command}")
    with stage(f"packages {', '.join(missing)}"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        run_shown("apt-get", "update", "-q", env=environment, timeout_s=300)
        install = ("apt-get", "install", "-q", "--yes", "--no-install-recommends", *missing)
        run_shown(*install, env=environment, timeout_s=600)


def ensure_root(purpose: str) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"{purpose} needs root; MODE=api needs no root, and E2E_CLUSTER=kind works with Docker")


def _exists(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else shutil.which(program) is not None
