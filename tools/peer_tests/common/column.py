"""Runs one column of results: the tests of a suite on one server. An interrupted column can be continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Failures of tests whose server was gone or too slow. These failures show nothing about the server's answers.
_LOST = re.compile(
    r"Connection error|ConnectionError|APITimeoutError|Timeout \(?>|failed to start in time|exited unexp"
    r"|KeyboardInterrupt|SystemExit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The settings with which the tests of a suite run on one server."""

    python: Path  # the interpreter of the suite's environment
    root: Path  # the working directory of pytest
    files: Sequence[str]  # relative to `root`
    plugins: Sequence[str]
    variables: Mapping[str, str]  # the whole environment of the tests, without that of the recorder
    results: Path
    test_seconds: int  # time limit of one test, without its fixtures
    words: Sequence[str] = ()  # further arguments for pytest


def run_column(column: Column, *, resume: bool, words: Sequence[str] = (), only: Sequence[str] | None = None) -> None:
    """Runs the tests and appends to `results`. With `resume`, runs only tests that have no result yet.

    `words`: further arguments for pytest. `only`: the ids of the tests that may run, or None for all tests.
    """
    environment = {**column.variables, "PEER_TESTS_RESULTS": str(column.results)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    if resume:
        environment["PEER_TESTS_RESUME"] = "1"
    if only is not None:
        chosen = column.results.with_suffix(".only")
        chosen.write_text("".join(f"{test}\n" for test in only), encoding="utf-8")
        environment["PEER_TESTS_ONLY"] = str(chosen)
    flags = ["-p", "peer_tests.common.recorder"]
    for plugin in column.plugins:
        flags += ["-p", plugin]
    flags += ["-c", "/dev/null", "--rootdir", str(column.root), "-q", "--no-header", "--tb=short"]
    flags += ["--continue-on-collection-errors", "-p", "no:cacheprovider", f"--timeout={column.test_seconds}"]
    flags += ["-o", "timeout_func_only=true", *column.words, *words]
    try:
        command = [str(column.python), "-m", "pytest", *flags, *column.files]
        subprocess.run(command, cwd=column.root, env=environment, check=False)
    finally:
        _kill_servers(column.results.with_suffix(".pids"))


def forget_lost(results: Path) -> int:
    """Removes from the file the results of tests that lost their server. Returns the number of removed results."""
    if not results.exists():
        return 0
    lines = results.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    lost = {each["test"] for each in records if each["outcome"] == "failed" and _LOST.search(each["message"])}
    kept = [line for line, each in zip(lines, records, strict=True) if each["test"] not in lost]
    results.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return len(lost)


def _kill_servers(pids: Path) -> None:
    """Kills the process groups of servers that outlived the tests, for example because the tests were killed."""
    if not pids.exists():
        return
    for line in pids.read_text(encoding="utf-8").splitlines():
        # If the server has ended, another program may have a group with this id now.
        if _group_variables(int(line)) & {b"PEER_TESTS_RESULTS=" + os.fsencode(pids.with_suffix(".jsonl"))}:
            print(f"kills the server {line}, which outlived the tests", file=sys.stderr)
            os.killpg(int(line), signal.SIGKILL)
    pids.unlink()


def _group_variables(group: int) -> set[bytes]:
    """Returns the environment of the first process of a group; empty if there is none."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getpgid(int(folder.name)) == group:
                return set((folder / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
    return set()
