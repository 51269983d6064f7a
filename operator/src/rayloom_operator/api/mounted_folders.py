"""The rules for paths at which pods mount folders of the nodes, and for paths in claims."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rayloom_operator.api.pod_template.reserved_parts import ADAPTERS_FOLDER, OWN_FOLDERS, SEALED_FOLDERS

UP = re.compile(r"(^|/)\.\.?(/|$)")
UP_IN_WORDS = "the path must not have a part '.' or '..'; write it without them"
# The folder at which a claim with the model is mounted. If the model is in a claim, nothing else may be in this folder.
MODELS_FOLDER = "/models"
CACHE_FOLDER = "/cache"  # model.cache is mounted at this folder
_KERNEL_FOLDERS = ("/proc", "/sys")
# Folders of the engine's image and of the kernel: a mount in one of them could hide files that the engine needs.
_IMAGE_FOLDERS = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/opt/rayloom",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/usr",
    "/var/run",
)
# Parents of some of _IMAGE_FOLDERS. A mount at one of these two paths would hide the folders of the image. A mount at a
# subfolder of these two is allowed, unless the subfolder is one of _IMAGE_FOLDERS or lies inside one.
_IMAGE_PARENTS = ("/opt", "/var")
CLOSED = (ADAPTERS_FOLDER, *_IMAGE_FOLDERS)  # for adapters and draft models: nothing can be mounted inside
HIDING = sorted(  # a mount at one of these folders would hide a folder of the pod
    folder
    for folder in (*_IMAGE_PARENTS, *OWN_FOLDERS)
    if folder != MODELS_FOLDER and not any(folder.startswith(f"{each}/") for each in CLOSED)
)
# The rules for the model itself refuse fewer folders, because services that serve may have models in folders of the
# image, such as /usr/share/models. No engine starts with a model at one of these folders: the mount would hide the
# folder, or the container would have two mounts with one path.
NO_MODEL_FOLDERS = sorted({*_IMAGE_FOLDERS, *HIDING, "/dev/shm"} - {CACHE_FOLDER, *_KERNEL_FOLDERS})
SEALED = (*SEALED_FOLDERS, *_KERNEL_FOLDERS)  # for the model: no folder for a mount can be made inside
# '..' alone: models of services that serve may have a part '.'.
BACK = re.compile(r"^(file|pvc)://.*/\.\.(/|$)")
BACK_IN_WORDS = "the path must not have a part '..'; write it without it"


def _spelled(folder: str) -> str:
    """Returns a regular expression for a path, also with needless slashes and parts '.'."""
    return "".join(rf"/(\.?/)*{part}" for part in folder.split("/")[1:])


def source_at(*folders: str) -> re.Pattern[str]:
    """Returns a pattern for file:// sources that are exactly one of `folders`. An empty text is the root folder."""
    return re.compile(rf"^file://({'|'.join(map(_spelled, folders))})(/\.?)*$")


NO_MODEL_AT = re.compile(
    rf"{source_at('', *NO_MODEL_FOLDERS).pattern}|^file://({'|'.join(map(_spelled, SEALED))})(/.*)?$"
)


def taken_in_words(folder: str, hiding: Iterable[str] = HIDING, closed: Iterable[str] = CLOSED) -> str:
    """Returns the part of a message that says which paths are not allowed. `folder`: the word for the path.

    `hiding`: folders that are not allowed. `closed`: folders that are not allowed with all that is in them.
    """
    return (
        f"where it must not hide a folder of their own or of the engine's image: {folder} must not be "
        f"{', '.join(hiding)}, nor be or lie in {', '.join(closed)}"
    )
