"""A pytest plugin: `-p cpu_by_file` prints the CPU seconds of each test file, including ended child processes.

Unlike durations, these seconds hardly depend on other programs on the machine. `--write-seconds` stores the durations
of long files, which determine the order of later runs (rt_schedule.py).
"""

from __future__ import annotations

import json
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-seconds", action="store_true", help="the order of later runs follows from this run")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    # The report gets a list of its own, because the value belongs only to this phase. All phases of a test share the
    # item's list.
    report.user_properties = [*report.user_properties, (_CPU, _meter.lap())]
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from rt_schedule import LISTED_S, SECONDS, file_of  # pytest can import this module only after it has loaded plugins

    cpu_s: Counter[str] = Counter()
    wall_s: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            file = file_of(getattr(report, "nodeid", ""))
            wall_s[file] += getattr(report, "duration", 0.0)
            for name, value in getattr(report, "user_properties", ()):
                if name == _CPU:
                    cpu_s[file] += value
    terminalreporter.section("CPU seconds and seconds by file")
    for file, value in cpu_s.most_common():
        terminalreporter.write_line(f"{value:8.2f} {wall_s[file]:8.2f}  {file}")
    terminalreporter.write_line(f"{sum(cpu_s.values()):8.2f} {sum(wall_s.values()):8.2f}  all")
    if config.getoption("write_seconds"):
        listed = {file: round(seconds) for file, seconds in wall_s.most_common() if seconds >= LISTED_S}
        SECONDS.write_text(json.dumps(listed, indent=2) + "\n")
