"""`make chaos` with one fault: it runs, counts and prints a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rt_faults


@pytest.mark.slow
def test_one_fault_ends_with_a_table_and_no_failed_request() -> None:
    command = [sys.executable, str(Path(__file__).with_name("chaos.py"))]
    arguments = ["--seed", "0", "--faults", "1", "--executors", "mp"]  # with seed 0 the core is killed
    path = os.pathsep.join([str(Path(rt_faults.__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200.0, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "seed 0, 1 faults over mp"
    assert lines[1].startswith("mp 1/1: core killed at 22 tokens: noticed after ")
    assert [line.split()[:4] for line in lines if line.startswith("mp  ")] == [["mp", "core", "killed", "1"]]
    assert lines[-1].startswith("seed 0: 0 of ")
