"""Settings of all test processes: long files run first, and measurements are printed at the end."""

from __future__ import annotations

import gc
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rt_bytecode import files_without_bytecode, write_bytecode
from rt_schedule import longest_first, scheduler, seconds_on_file

_MEASURED = "measured"
collect_ignore = ["clients"]  # `make client-tests` runs this folder, in an environment with the clients


def pytest_configure() -> None:
    """Makes HTTP clients cheap in this process and in processes that tests start. Tests use plain HTTP.

    By default each httpx.Client, and so each httpx.get, first parses a file with all certificates. This takes 25 ms of
    CPU time. From a folder, OpenSSL reads a certificate only when a connection needs this certificate.
    """
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ.setdefault("SSL_CERT_DIR", ssl.get_default_verify_paths().openssl_capath)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Sets up hypothesis in a process that runs tests.

    Exempts imported modules and collected tests from garbage collection, because they are needed until the end.
    """
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        _let_hypothesis_take_its_time()
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
        gc.freeze()
    return result


def _let_hypothesis_take_its_time() -> None:
    """Removes hypothesis' time limits: on a busy machine an example takes over 200 ms, and ten examples over a second.

    With the variable CI in the environment, each run has the same examples, so that a change fails only by its own
    faults. Without this variable, a run tries new examples.
    """
    try:
        from hypothesis import HealthCheck, settings
    except ModuleNotFoundError:  # the environment of `make client-tests`
        return
    settings.register_profile(
        "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
    )
    settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts long files first. Files that share a server run one after the other."""
    items[:] = [items[index] for index in longest_first([item.nodeid for item in items], seconds_on_file())]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Writes the bytecode of test files before the processes that import them start."""
    folders = [path for path in map(Path, config.args) if path.is_dir()]
    write_bytecode(config, files_without_bytecode(folders))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With `--dist loadfile`, this scheduler distributes the tests."""
    return scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


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
