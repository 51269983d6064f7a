"""The server that `make client-tests` has started, and a table of clients and features at the end."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

_FEATURE = "feature"


@pytest.fixture(scope="session")
def server_url() -> str:
    """The address of the API port, without a path."""
    return os.environ["RAYLOOM_URL"]


@pytest.fixture(scope="session")
def base_url(server_url: str) -> str:
    """The base URL of OpenAI's clients."""
    return f"{server_url}/v1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers(_FEATURE):
        item.user_properties.append((_FEATURE, marker.args[0]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the passed tests of each client and feature, as "2 of 3"."""
    passed: dict[tuple[str, str], int] = defaultdict(int)
    total: dict[tuple[str, str], int] = defaultdict(int)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when != "call":
                continue
            client = report.nodeid.partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
            for name, feature in report.user_properties:
                if name == _FEATURE:
                    total[client, feature] += 1
                    passed[client, feature] += outcome == "passed"
    terminalreporter.section("clients and features")
    for client, feature in sorted(total):
        terminalreporter.write_line(f"{client:<15} {feature:<20} {passed[client, feature]} of {total[client, feature]}")
