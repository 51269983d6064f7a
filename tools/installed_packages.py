"""Keeps the packages of a virtual environment in the cache, so that a new checkout links them in seconds.

    python tools/installed_packages.py store .venv CACHE KEY
    python tools/installed_packages.py restore .venv CACHE KEY

CACHE is a folder, and KEY identifies the pins of the packages. Files are hard links, so the cache takes no disk space
in addition to an environment with the same files. `store` does nothing if the cache is on another file system. pip
replaces files and never writes into them. So environments that share files do not change each other. Our own packages
are not kept: they belong to one checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_KEPT = 2  # number of kept environments: the present one, and the newest of the others
INCOMPLETE = "incomplete"  # a file in an environment that `restore` has not finished; `make` then clears it
_UNFINISHED = ".new-"  # beginning of the name of a folder that `store` has not finished
_UNFINISHED_S = 3600.0  # age from which an unfinished folder counts as left by a killed process
_PREFIX_FILE = "made-in"  # has the path of the environment in which the scripts were installed
# Beginnings of the names of files that belong to one environment.
_OWN = ("installed-", "cpu-library-", "triton-cache", "pyvenv.cfg", "lib64", ".lock")
_OWN_SCRIPTS = ("python", "activate", "Activate", "rayloom")  # beginnings of names
_OWN_PACKAGES = ("rayloom_", "__editable__.rayloom_", "__editable___rayloom_")  # beginnings of names


def store(venv: Path, kept: Path) -> None:
    """Links the packages of `venv` into the folder `kept`. Raises OSError, also if `kept` is on another file system."""

    def is_own(path: str, name: str) -> bool:
        folder = Path(path).relative_to(venv)
        if folder.name == "site-packages" and len(folder.parts) == 3:
            return name.startswith(_OWN_PACKAGES)
        return name.startswith({"": _OWN, "bin": _OWN_SCRIPTS}.get("/".join(folder.parts), ("\0",)))

    kept.parent.mkdir(parents=True, exist_ok=True)
    _check_device(kept.parent, venv)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=_UNFINISHED) as folder:
        new = Path(folder) / "new"
        shutil.copytree(
            venv,
            new,
            symlinks=True,
            copy_function=os.link,
            ignore=lambda path, names: {name for name in names if is_own(path, name)},
        )
        (new / _PREFIX_FILE).write_text(str(venv.resolve()))
        if kept.exists():
            kept.rename(Path(folder) / "old")  # so that nobody finds an environment that is removed in part
        new.rename(kept)
    _remove_old(kept)


def _remove_old(kept: Path) -> None:
    """Removes the oldest environments beside `kept`, and the folders that killed processes have left."""
    ages = {each: time.time() - each.stat().st_mtime for each in kept.parent.iterdir() if each != kept}
    others = sorted((each for each in ages if not each.name.startswith(_UNFINISHED)), key=lambda each: ages[each])
    left = [each for each in ages if each.name.startswith(_UNFINISHED) and ages[each] > _UNFINISHED_S]
    for each in (*others[MOST_KEPT - 1 :], *left):
        folder = tempfile.TemporaryDirectory(dir=kept.parent, prefix=_UNFINISHED)
        with folder as path, contextlib.suppress(FileNotFoundError):  # another process removes it
            each.rename(Path(path) / "old")


def restore(venv: Path, kept: Path) -> None:
    """Makes `venv` with the packages in `kept`. Raises OSError and CalledProcessError.

    If an error leaves `venv` incomplete, `venv` has the file INCOMPLETE.
    """
    venv.parent.mkdir(parents=True, exist_ok=True)
    _check_device(kept, venv.parent)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True)
    (venv / INCOMPLETE).touch()
    prefix = (kept / _PREFIX_FILE).read_text()
    scripts = kept / "bin"
    shutil.copytree(
        kept, venv, symlinks=True, copy_function=os.link, dirs_exist_ok=True, ignore=lambda path, names: {_PREFIX_FILE}
    )
    # A script contains the path of its environment's Python, so each environment needs its own copy.
    for script in scripts.iterdir():
        content = script.read_bytes()
        if prefix.encode() in content:
            own = venv / "bin" / script.name
            own.unlink()
            own.write_bytes(content.replace(prefix.encode(), str(venv.resolve()).encode()))
            shutil.copymode(script, own)
    (venv / INCOMPLETE).unlink()


def _python() -> str:
    """Returns a key of this Python. Environments whose Python has the same key can link the same packages."""
    return "-".join((sys.implementation.cache_tag, platform.python_version() + sys.abiflags, platform.machine()))


def _check_device(kept: Path, venv: Path) -> None:
    """Raises OSError if the folders are on two file systems, between which there are no hard links."""
    if kept.stat().st_dev != venv.stat().st_dev:
        raise OSError(errno.EXDEV, "the cache is on another file system")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("store", "restore"))
    parser.add_argument("venv", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("key")
    given = parser.parse_args()
    kept = given.cache / f"{given.key}-{_python()}"
    try:
        if given.action == "store":
            store(given.venv, kept)
        elif not kept.is_dir():
            return 1
        else:
            restore(given.venv, kept)
    except (OSError, subprocess.CalledProcessError) as error:
        first = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        print(f"{given.action} of {kept}: {first}", file=sys.stderr)
        if (given.venv / INCOMPLETE).exists():
            shutil.rmtree(given.venv, ignore_errors=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
