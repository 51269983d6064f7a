"""vLLM's source distribution, which contains vLLM's tests, and the packages that these need beside vLLM's CPU build."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rayloom_bench.peers.engines.installation import Log, PeerMissing, installed, pip
from rayloom_bench.peers.engines.vllm_cpu import VERSION

TEST_PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "tblib", "schemathesis", "jsonschema")
RECIPE = 1  # part of the folder's name; raise it when the steps of the installation change


def source(parent: Path, python: Path, *, log: Log) -> Path:
    """Returns the folder that holds vLLM's folder `tests`, below `parent`. Installs TEST_PACKAGES for `python`.

    Raises PeerMissing.
    """
    folder = parent / f"vllm-tests-{VERSION}-recipe-{RECIPE}"
    return installed(folder, lambda target: _install(target, python, log), what=f"the tests of vLLM {VERSION}", log=log)


def _install(folder: Path, python: Path, log: Log) -> None:
    pip(python, "install", "--quiet", *TEST_PACKAGES, log=log)
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    # pip unpacks a source distribution before it computes the metadata, for which vLLM needs a GPU's compiler. So the
    # command fails, and `--no-clean` keeps the unpacked files.
    words = ["download", "--quiet", f"vllm=={VERSION}", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words, "--no-clean"]
    log("  " + " ".join(command))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "TMPDIR": str(unpacked)}, capture_output=True, text=True
    )
    tests = next((path.parent for path in unpacked.rglob("tests/utils.py") if _has_api_tests(path.parent)), None)
    if tests is None:
        raise PeerMissing(f"the tests of vLLM {VERSION} could not be downloaded:\n{done.stderr[-2000:]}")
    shutil.move(tests, folder / "tests")
    shutil.rmtree(unpacked)


def _has_api_tests(tests: Path) -> bool:
    """True for the folder with the tests of the API."""
    return (tests / "entrypoints" / "openai").is_dir()
