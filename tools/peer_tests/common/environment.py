"""The Python environment in which the tests of llama.cpp and SGLang run: HTTP clients and pytest, no engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rayloom_bench.peers.engines.installation import Log, installed, make_environment, pip

# The versions of llama.cpp's tools/server/tests/requirements.txt, and a plugin that limits the time of a test.
PACKAGES = (
    "aiohttp~=3.9.3",
    "filelock~=3.16",
    "numpy~=2.2.6",
    "openai~=2.14.0",
    "prometheus-client~=0.20.0",
    "pytest~=8.3.3",
    "pytest-timeout~=2.4",
    "requests~=2.32.3",
)


def client_python(cache: Path, *, log: Log) -> Path:
    """Returns the interpreter of the environment; makes it first if needed. Raises PeerMissing."""
    folder = cache / f"peer-test-clients-{hashlib.sha256(repr(PACKAGES).encode()).hexdigest()[:8]}"

    def install(into: Path) -> None:
        pip(make_environment(into / "venv", log), "install", "--quiet", *PACKAGES, log=log)

    return installed(folder, install, what="the clients of the peers' tests", log=log) / "venv" / "bin" / "python"
