"""The base image of engine and operator (Debian with Python), and the image of the pause program in every pod."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_kubernetes.images.store import CONTAINER, LABEL, storage_lock
from local_kubernetes.machine.files import remove_folder
from local_kubernetes.machine.place import digest
from local_kubernetes.machine.shell import ClusterError, run, stage
from local_kubernetes.parts.build import partial_folder

BASE = "rayloom.dev/base"
_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
_BASE_RELEASE = "bookworm"


def base_image() -> str:
    """The name of a local image with Debian and Debian's Python, made by debootstrap in place of a public image."""
    key = digest(_BASE_RELEASE.encode(), *(package.encode() for package in _BASE_PACKAGES))
    name = f"{BASE}:{key}"
    with storage_lock():
        if not _has_image(name):
            with stage("base image (about a minute)"):
                _make_base(name, key)
    return name


def pause_image(pause: Path) -> str:
    """The name of the image of a pod's sandbox container, with the program `pause` alone."""
    name = f"rayloom.dev/pause:{pause.parent.name.rpartition('-')[2]}"
    with storage_lock():
        if not _has_image(name):
            with _container("scratch") as container:
                run("buildah", "copy", "-q", container, pause, "/pause")
                run("buildah", "config", "--entrypoint", '["/pause"]', "--label", f"{LABEL}=pause", container)
                run("buildah", "commit", "-q", container, name)
    return name


def _make_base(name: str, key: str) -> None:
    root = partial_folder(f"base-{key}")
    # debootstrap mounts file systems below its target. The kernel unmounts these file systems when the mount namespace
    # ends, even if debootstrap fails.
    apart = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        packages = f"--include={','.join(_BASE_PACKAGES)}"
        run(*apart, "debootstrap", "--variant=minbase", packages, _BASE_RELEASE, root, timeout_s=3600)
        for junk in ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / junk, ignore_errors=True)
            (root / junk).mkdir(parents=True)
        with _container("scratch") as container:
            run("buildah", "copy", "-q", container, f"{root}/", "/", timeout_s=1200)
            # Images built on this image inherit the label.
            run("buildah", "config", "--label", f"{LABEL}=base", container)
            run("buildah", "commit", "-q", container, name, timeout_s=1200)
    finally:
        remove_folder(root)


@contextmanager
def _container(base: str) -> Iterator[str]:
    """Yields the name of a working container of buildah, and removes the container after the block."""
    container = run("buildah", "from", "--name", f"{CONTAINER}-{os.getpid()}", base).strip()
    try:
        yield container
    finally:
        run("buildah", "rm", container)


def _has_image(name: str) -> bool:
    try:
        run("buildah", "inspect", "--type", "image", name)
    except ClusterError:
        return False
    return True
