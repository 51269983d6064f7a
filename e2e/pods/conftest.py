"""Fixtures that print what clients saw of a fault or a rollout, and the tables of all of them at the end.

The tables are also written to artifacts/faults.md and artifacts/rolls.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from disruptions import rollouts, streams

_ARTIFACTS = Path(__file__).parents[1] / "artifacts"
_fault_rows: list[str] = []
_rollout_rows: list[str] = []


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str, streams.Seen], None]:
    """show("a worker pod is deleted", seen) prints the timeline of a fault and adds a row to the table at the end."""

    def shown(what: str, seen: streams.Seen) -> None:
        _fault_rows.append(seen.row(what))
        with capsys.disabled():
            print(f"\n{seen.timeline.table()}")
            for problem in (*seen.failures, *seen.lies):
                print(f"  FAILED: {problem[:1000]}")

    return shown


@pytest.fixture
def show_roll(capsys: pytest.CaptureFixture[str]) -> Callable[[rollouts.Roll], None]:
    """show_roll(seen) prints the timeline of a rollout and adds a row to the table at the end."""

    def shown(seen: rollouts.Roll) -> None:
        _rollout_rows.append(seen.row())
        with capsys.disabled():
            pause_s, at = seen.longest_pause
            print(f"\n{seen.timeline.table()}\n  longest pause of the prober: {pause_s:.1f} s, from {at:.1f} s on")
            for failure in seen.failures:
                print(f"  FAILED at {seen.timeline.seconds(failure.began):.1f} s: {failure.what[:1000]}")
            for lie in seen.lies:
                print(f"  UNTRUE: {lie}")

    return shown


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints and writes the tables."""
    tables = (("faults", streams.HEADER, _fault_rows), ("rolls", rollouts.HEADER, _rollout_rows))
    for name, header, rows in tables:
        if rows:
            table = "\n".join([*header, *rows]) + "\n"
            _ARTIFACTS.mkdir(exist_ok=True)
            (_ARTIFACTS / f"{name}.md").write_text(table)
            terminalreporter.write(f"\n{table}")
