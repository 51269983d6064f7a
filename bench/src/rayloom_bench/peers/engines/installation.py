"""Installs a peer once into the cache, outside of the checkout: a folder whose name holds the peer's versions."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rayloom_engine.errors import EngineError
from rayloom_engine.models.checkpoint.source import cache_folder

STAMP = "installed"  # exists in a folder only when its installation is complete
OUTPUT_LINES_SHOWN = 30

Log = Callable[[str], None]


class PeerMissing(EngineError):
    """A peer could not be installed. The message has the failed command and the end of its output."""


def peers_folder(environ: Mapping[str, str]) -> Path:
    """The folder with all peers: `peers` in the engine's cache."""
    return cache_folder(environ) / "peers"


def installed(folder: Path, install: Callable[[Path], None], *, what: str, log: Log) -> Path:
    """Returns `folder` with the result of `install(folder)`, which runs only if the folder is not complete yet.

    Python environments contain absolute paths, so a peer is installed in its final folder. The file STAMP is written
    last. A folder without the stamp is removed first. Several processes may call this function at once. Raises
    PeerMissing.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / STAMP).exists():
            return folder
        log(f"installing {what} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        install(folder)
        (folder / STAMP).touch()
    return folder


def run_step(command: Sequence[str | Path], *, folder: Path | None = None, log: Log) -> str:
    """Runs a command of an installation; returns its standard output. Raises PeerMissing if it fails."""
    words = [str(word) for word in command]
    log("  " + " ".join(words))
    # An installation must not see the packages of this process's own environment.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise PeerMissing(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).splitlines()[-OUTPUT_LINES_SHOWN:]
        raise PeerMissing(f"{' '.join(words)} ended with exit code {done.returncode}:\n" + "\n".join(lines))
    return done.stdout


def make_environment(folder: Path, log: Log) -> Path:
    """Makes an empty Python environment in `folder`; returns its interpreter."""
    run_step([sys.executable, "-m", "venv", folder], log=log)
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path, log: Log) -> None:
    """Runs `pip` of an environment, with the package index and certificates that this machine is configured for."""
    run_step([python, "-m", "pip", "--disable-pip-version-check", *arguments], log=log)


def require_tools(*names: str) -> None:
    """Raises PeerMissing unless every tool is on the PATH."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise PeerMissing(f"building needs {', '.join(missing)} on the PATH; install them with the system's packages")
