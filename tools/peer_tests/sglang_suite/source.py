"""SGLang's source distribution, whose package `sglang.test` holds checks of the API that its servers must pass."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rayloom_bench.peers.engines.installation import Log, PeerMissing, installed

VERSION = "0.5.10.post1"
RECIPE = 1  # part of the folder's name; raise it when the steps of the installation change


def source(parent: Path, python: Path, *, log: Log) -> Path:
    """Returns the folder that holds SGLang's folder `sglang/test`, below `parent`. Raises PeerMissing."""
    folder = parent / f"sglang-tests-{VERSION}-recipe-{RECIPE}"
    what = f"the tests of SGLang {VERSION}"
    return installed(folder, lambda target: _install(target, python, log), what=what, log=log)


def _install(folder: Path, python: Path, log: Log) -> None:
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    # As for vLLM, pip's metadata step needs a compiler, so the command may fail. `--no-clean` keeps the unpacked files.
    words = ["download", "--quiet", f"sglang=={VERSION}", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words, "--no-clean"]
    log("  " + " ".join(command))
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "TMPDIR": str(unpacked)}, capture_output=True, text=True
    )
    tests = next((path.parent for path in unpacked.rglob("sglang/test/tool_call_test_runner.py")), None)
    if tests is None:
        raise PeerMissing(f"the tests of SGLang {VERSION} could not be downloaded:\n{done.stderr[-2000:]}")
    (folder / "sglang").mkdir()
    shutil.move(tests, folder / "sglang" / "test")
    shutil.rmtree(unpacked)
