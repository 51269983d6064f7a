"""Settings of all test processes: long files run first, and measurements are printed at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_MEASURED = "measured"
collect_ignore = ["clients"]  # `make client-tests` runs them, in an environment with the clients
# Parts of the paths of long tests, the longest first.
_LONG = ("engine_real", "_machine.py")

# Tests reach no server outside this machine. Without this, each HTTP client of the tests and of their processes would
# read all public certificates, which takes 27 ms of CPU time. This file has one, of which nobody has the key.
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("data") / "certificate.pem"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts long tests first, so that no process waits for another one's last file at the end."""
    items.sort(key=lambda item: next((place for place, part in enumerate(_LONG) if part in item.nodeid), len(_LONG)))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """measured("next token after 1.20 s") adds a line to the table at the end."""
    return lambda line: request.node.user_properties.append((_MEASURED, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    lines = [
        f"{report.nodeid.rpartition('/')[2]}: {line}"
        for report in reports
        if report.when == "call"
        for name, line in report.user_properties
        if name == _MEASURED
    ]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write("\n".join([*sorted(lines), ""]))
