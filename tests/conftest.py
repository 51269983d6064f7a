"""Settings of all test processes: long files run first, and measurements are printed at the end."""

from __future__ import annotations

import gc
import os
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rt_shared import scope_of

_MEASURED = "measured"
collect_ignore = ["clients"]  # `make client-tests` runs them, in an environment with the clients
# Parts of the paths of long tests, the longest first.
_LONG = ("engine_real", "_machine.py")


def pytest_configure() -> None:
    """Makes HTTP clients cheap in this process and in those that tests start: tests use plain HTTP.

    Otherwise each httpx.Client, and so each httpx.get, first parses a file of all certificates: 25 ms of CPU time. From
    a folder, OpenSSL reads a certificate only when a connection needs it.
    """
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ.setdefault("SSL_CERT_DIR", ssl.get_default_verify_paths().openssl_capath)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempts imported modules and collected tests from garbage collections, because all of them stay."""
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
        gc.freeze()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts long tests first, so that no process waits for another one's last file at the end.

    The files that share a server follow one another.
    """
    scopes: dict[str, int] = {}
    for item in items:
        scopes.setdefault(scope_of(_file(item.nodeid)), len(scopes))

    def place(item: pytest.Item) -> tuple[int, int]:
        length = next((place for place, part in enumerate(_LONG) if part in item.nodeid), len(_LONG))
        return length, scopes[scope_of(_file(item.nodeid))]

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Keeps the files that share a server in one process, with `--dist loadfile`."""
    from xdist.scheduler import LoadFileScheduling

    class LoadServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(_file(nodeid))

    return LoadServer(config, log) if config.getvalue("dist") == "loadfile" else None


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


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
