"""Does `pip install` by uv, which needs a fifth of pip's processor time, or by pip if uv cannot do it.

    python tools/pip_or_uv.py PYTHON ARGUMENTS...

PYTHON is an environment's interpreter, and ARGUMENTS are arguments of `pip install` that uv has as well. uv reads none
of pip's settings, so this program passes them on: indexes, certificates, constraints. uv and its cache are in a folder
in the environment, so that the installed files become hard links. The folder is removed at the end. No module is
compiled, because Python compiles a module at its first import.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

UV = "uv==0.13.9"
# Option of pip -> uv's variable, and what separates several values.
_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
}
# Options that do not change which files are installed.
_IGNORED = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
_SECTIONS = ("global", "install", ":env:")  # a later one overrides an earlier one
# Python's HTTP library, which pip uses, reads these variables.
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class NotByUv(Exception):
    """uv cannot install these packages; the message says why."""


def install(python: str | Path, *arguments: str | Path) -> int:
    """Installs packages into the environment of the interpreter `python`. Returns pip's exit code, 0 after uv."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    words = [str(argument) for argument in arguments]
    try:
        _install_by_uv(pip, words)
    except NotByUv as error:
        print(f"pip installs, not uv, because {error}", flush=True)
        return subprocess.run([*pip, "install", "--no-compile", *words]).returncode
    return 0


def _install_by_uv(pip: Sequence[str], words: Sequence[str]) -> None:
    python = pip[0]
    settings, constraints = uv_settings(_read([*pip, "config", "list"]), os.environ)
    prefix = _read([python, "-c", "import sys; print(sys.prefix)"]).strip()
    with tempfile.TemporaryDirectory(dir=prefix, prefix=".uv-") as folder:
        _read([*pip, "install", "--quiet", "--no-compile", "--no-deps", "--target", folder, UV])
        uv = [f"{folder}/bin/uv", "pip", "install", "--python", python, "--cache-dir", f"{folder}/cache"]
        # Nothing but pip's settings counts here, so files of uv's own settings are ignored.
        command = [*uv, "--no-config", "--no-progress", *constraints, *words]
        if subprocess.run(command, env=os.environ | settings).returncode != 0:
            raise NotByUv("uv failed, see above")


def uv_settings(listed: str, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns uv's variables and arguments for pip's settings, which are the output of `pip config list`.

    Raises NotByUv if pip has a setting with another effect.
    """
    options: dict[str, str] = {}
    for section in _SECTIONS:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(f"{section}."):
                options[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
    # pip takes the best version of all indexes; uv's default is the first index that has the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    bundle = next((environ[name] for name in _BUNDLES if environ.get(name)), None)
    if bundle is not None:
        variables["SSL_CERT_FILE"] = bundle
    constraints: list[str] = []
    for name, value in options.items():
        if name == "constraint":
            constraints = [word for path in value.split() for word in ("-c", path)]
        elif name in _VARIABLES:
            variable, separator = _VARIABLES[name]
            # uv fails if a folder of links is missing, and pip does not.
            values = [each for each in value.split() if name != "find-links" or "://" in each or Path(each).exists()]
            if values:
                variables[variable] = separator.join(values) if separator else value
        elif name not in _IGNORED:
            raise NotByUv(f"uv cannot be told pip's setting {name}")
    return variables, constraints


def _read(command: Sequence[str]) -> str:
    """Returns the command's standard output. Raises NotByUv with the end of its errors if the command fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise NotByUv(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotByUv(f"`{' '.join(command[1:5])}` failed: {last}")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(install(*sys.argv[1:]))
