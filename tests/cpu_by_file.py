"""A pytest plugin: `-p cpu_by_file` prints the CPU seconds of each test file, child processes that have ended included.

Unlike durations, these seconds hardly depend on other programs on the machine.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

_CPU = "cpu_s"


class _Meter:
    def __init__(self) -> None:
        self._read_s = sum(os.times()[:4])

    def lap(self) -> float:
        """Returns the CPU seconds of this process and of its children since the last call."""
        before = self._read_s
        self._read_s = sum(os.times()[:4])
        return self._read_s - before


_meter = _Meter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    # Of this phase alone: the list of the item goes into the reports of all its phases.
    report.user_properties = [*report.user_properties, (_CPU, _meter.lap())]
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            file = getattr(report, "nodeid", "").partition("::")[0]
            for name, value in getattr(report, "user_properties", ()):
                if name == _CPU:
                    seconds[file] += value
    terminalreporter.section("CPU seconds by file")
    for file, value in seconds.most_common():
        terminalreporter.write_line(f"{value:8.2f}  {file}")
    terminalreporter.write_line(f"{sum(seconds.values()):8.2f}  all")
