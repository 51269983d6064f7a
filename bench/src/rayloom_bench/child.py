"""Runs a measurement in a fresh Python process.

The process reads a JSON job and prints JSON lines, of which the last is the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rayloom_engine.errors import EngineError


class ChildFailed(EngineError):
    """A measuring process ended without a result. Its error output is on our stderr."""


def run_child(
    module: str, job: Mapping[str, object], *, threads: int, on_progress: Callable[[int], object] = lambda done: None
) -> dict[str, Any]:
    """Runs `python -m module` with the job on its stdin; returns the object of its `{"result": ...}` line.

    For each line `{"progress": N}`, calls `on_progress` with N. The process has ended when this function returns or
    raises. Raises ChildFailed if it ends without a result.
    """
    # The thread pools of torch read these variables once, when torch is imported.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None  # for mypy: both are pipes
    result: dict[str, Any] | None = None
    try:
        try:
            process.stdin.write(json.dumps(job))
            process.stdin.close()
        except BrokenPipeError:
            pass  # the process ended before it read the job; the error below has its exit code
        for line in process.stdout:
            message = json.loads(line)
            if "progress" in message:
                on_progress(message["progress"])
            elif "result" in message:
                result = message["result"]
        code = process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code != 0 or result is None:
        raise ChildFailed(
            f"python -m {module} ended with exit code {code} and {'no' if result is None else 'a'} result"
        )
    return result


def report_progress(done: int) -> None:
    """Reports from the child process that `done` requests are finished."""
    print(json.dumps({"progress": done}), flush=True)


def report_result(result: Mapping[str, object]) -> None:
    """Reports the result from the child process. It is called once, at the end."""
    print(json.dumps({"result": result}), flush=True)
