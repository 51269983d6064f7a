"""`rayloom-operator local` serves every manifest in examples/ that this machine can serve, unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rt_examples import SMOLLM2, TWO_REPLICAS, of_services
from rt_server import wait_until

# Other tests serve the rest: test_local_several.py serves TWO_REPLICAS, and docs/test_blocks.py SMOLLM2 (`make run`).
EXAMPLES = [
    path
    for path in of_services()
    if path not in (SMOLLM2, TWO_REPLICAS) and "source: builtin://" in path.read_text(encoding="utf-8")
]


# In `make test`, docs/test_blocks.py serves the same model on three ranks, engine_unit/test_shard_processes.py compares
# the tokens of three ranks, and operator_unit/test_examples.py reads the manifest.
SLOW = "smollm2-tp3"


@pytest.mark.parametrize(
    "manifest",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem == SLOW else path for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_answers_its_sample_and_ends_on_ctrl_c(manifest: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = [
        sys.executable,
        "-m",
        "rayloom_operator",
        "local",
        "-f",
        str(manifest),
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    with output.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        wait_until(
            lambda: "Press Ctrl-C to stop." in output.read_text() or process.poll() is not None, 120.0, output.read_text
        )
        assert process.poll() is None, output.read_text()
        assert "The capital of France is Paris." in output.read_text()
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 0, output.read_text()
        _, alive = psutil.wait_procs(started, timeout=60.0)
        assert alive == []
    finally:
        process.kill()
        process.wait()
