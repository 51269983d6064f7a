"""A plugin for pytest that records the result of each test. It imports none of our modules.

Results are appended to the file PEER_TESTS_RESULTS, one JSON object per line: one line when a test starts, and one line
with its outcome. So an interrupted run loses only one test. With PEER_TESTS_RESUME, tests with an outcome are not run
again. PEER_TESTS_ONLY names a file with the only tests that may run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 1800  # seconds that a server may take to start on a busy machine

# The suite's own plugin adds the files of tests during which a server was started.
FILES_WITH_SERVER: set[str] = set()
_GROUPS: list[int] = []


def mark_served() -> None:
    """Records that the tests of the current file use a server."""
    FILES_WITH_SERVER.add(os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[0])


def add_server(pid: int) -> None:
    """Records a server that leads a process group of its own. The group is killed if it outlives the tests."""
    mark_served()
    _GROUPS.append(pid)
    with _results().with_suffix(".pids").open("a", encoding="utf-8") as file:
        file.write(f"{pid}\n")


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> None:
    """Returns when `url` answers 200. Raises RuntimeError if the process has ended, TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited unexpectedly, with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("the server failed to start in time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    finished = _finished() if "PEER_TESTS_RESUME" in os.environ else set()
    only = None
    if "PEER_TESTS_ONLY" in os.environ:
        only = set(Path(os.environ["PEER_TESTS_ONLY"]).read_text(encoding="utf-8").splitlines())
    chosen = [item for item in items if item.nodeid not in finished and (only is None or item.nodeid in only)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "start", "started", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, Any]:
    """Writes the result of a test. The outcome is "unserved" for a test that used no server."""
    report = yield
    if report.when != "call" and report.outcome == "passed":
        return report
    # A fixture of a wider scope may have started the server while another file ran.
    has_fixture = any("Server" in type(value).__name__ for value in getattr(item, "funcargs", {}).values())
    is_served = has_fixture or item.nodeid.split("::", 1)[0] in FILES_WITH_SERVER
    _write(report.nodeid, report.when, report.outcome if is_served else "unserved", report.longrepr)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "collect", "failed", report.longrepr)


def pytest_unconfigure() -> None:
    for group in _GROUPS:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _finished() -> set[str]:
    """Returns the tests that have an outcome in the file of results."""
    finished: set[str] = set()
    if _results().exists():
        for line in _results().read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            is_open = record["outcome"] == "started" or (record["outcome"], record["when"]) == ("unserved", "setup")
            (finished.discard if is_open else finished.add)(record["test"])
    return finished


def _results() -> Path:
    return Path(os.environ["PEER_TESTS_RESULTS"])


def _write(test: str, when: str, outcome: str, cause: object) -> None:
    message = "" if cause is None else "\n".join(str(cause).strip().splitlines()[-6:])[-1000:]
    line = {"test": test, "when": when, "outcome": outcome, "message": message}
    with _results().open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
