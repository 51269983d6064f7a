"""tools/host_cost.py measures the parts of a decode step on the engine's present interfaces."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "host_cost.py"


def test_the_parts_of_a_step_are_measured_and_are_no_more_than_the_whole() -> None:
    run = subprocess.run([sys.executable, str(TOOL), "2"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    header, figures = run.stdout.splitlines()
    assert header.split()[:4] == ["us", "schedule", "black", "box"]
    batch, *parts, main_thread, all_threads, _wall = map(int, figures.split())
    assert batch == 2
    assert len(parts) == 7
    assert 0 < sum(parts) <= main_thread + len(parts), "each part is rounded"
    assert main_thread <= all_threads
