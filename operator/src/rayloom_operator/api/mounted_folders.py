"""The rules for paths at which pods mount folders of the nodes, and for paths in claims."""

from __future__ import annotations

import re

from rayloom_operator.api.pod_template.reserved_parts import ADAPTERS_FOLDER, OWN_FOLDERS

UP = re.compile(r"(^|/)\.\.?(/|$)")
UP_IN_WORDS = "the path must not have a part '.' or '..'; write it without them"
# The folder at which a claim with the model is mounted. If the model is in a claim, nothing else may be in this folder.
MODELS_FOLDER = "/models"
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
CLOSED = (ADAPTERS_FOLDER, *_IMAGE_FOLDERS)  # nothing can be mounted inside these folders
HIDING = sorted(  # a mount at one of these folders would hide a folder of the pod
    folder
    for folder in (*_IMAGE_PARENTS, *OWN_FOLDERS)
    if folder != MODELS_FOLDER and not any(folder.startswith(f"{each}/") for each in CLOSED)
)


def taken_in_words(folder: str) -> str:
    """Returns the part of a message that says which paths are not allowed. `folder`: the word for the path."""
    return (
        f"where it must not hide a folder of their own or of the engine's image: {folder} must not be "
        f"{', '.join(HIDING)}, nor be or lie in {', '.join(CLOSED)}"
    )
