"""Expected tokens of services, and fixtures that print the effects of faults, rollouts and disturbances on clients.

At the end, tables of these effects are printed, and written to faults.md, rolls.md and gateways.md in artifacts/pods/.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.service import CHAT, READY_SECONDS, tokens_of, wait
from disruptions import fault_under_load, gateway_under_load, rollout_under_load

_ARTIFACTS = Path(__file__).parents[1] / "artifacts" / "pods"
_fault_rows: list[str] = []
_rollout_rows: list[str] = []
_gateway_rows: list[str] = []


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tokens of an engine with one rank on this machine, in float32."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--dtype", "float32", "--served-model-name", "smollm2-pp2", "--num-kv-blocks", "64"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        wait(lambda: " ready: " in log.read_text() or process.poll() is not None, READY_SECONDS, log.read_text)
        assert process.poll() is None, log.read_text()
        url = log.read_text().split("API at ")[1].split(",")[0]
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps({"model": "smollm2-pp2", **CHAT}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return tokens_of(json.load(answer))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60.0)
        finally:
            process.kill()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str, fault_under_load.FaultRecord], None]:
    """show("a worker pod is deleted", seen) prints the timeline of a fault and adds a row to the table at the end."""

    def shown(what: str, seen: fault_under_load.FaultRecord) -> None:
        _fault_rows.append(seen.row(what))
        with capsys.disabled():
            print(f"\n{seen.timeline.table()}")
            for problem in (*seen.failures, *seen.untrue_times):
                print(f"  FAILED: {problem[:1000]}")

    return shown


@pytest.fixture
def show_rollout(capsys: pytest.CaptureFixture[str]) -> Callable[[rollout_under_load.RolloutRecord], None]:
    """show_rollout(seen) prints the timeline of a rollout and adds a row to the table at the end."""

    def shown(seen: rollout_under_load.RolloutRecord) -> None:
        _rollout_rows.append(seen.row())
        with capsys.disabled():
            pause_s, at = seen.longest_pause
            print(f"\n{seen.timeline.table()}\n  longest pause of the prober: {pause_s:.1f} s, from {at:.1f} s on")
            for failure in seen.failures:
                print(f"  FAILED at {seen.timeline.seconds(failure.began):.1f} s: {failure.what[:1000]}")
            for untrue in seen.untrue_times:
                print(f"  UNTRUE: {untrue}")

    return shown


@pytest.fixture
def show_gateway(capsys: pytest.CaptureFixture[str]) -> Callable[[gateway_under_load.GatewayRecord], None]:
    """show_gateway(seen) prints the timeline of a disturbance and adds a row to the table at the end."""

    def shown(seen: gateway_under_load.GatewayRecord) -> None:
        _gateway_rows.append(seen.row())
        with capsys.disabled():
            print(f"\n{seen.timeline.table()}")
            for failure in seen.failures:
                began_s, ended_s = (seen.timeline.seconds(failure.stream[name]) for name in ("began", "ended"))
                print(f"  FAILED {began_s:.1f} to {ended_s:.1f} s, {failure.stream['url']}: {failure.what[:1000]}")

    return shown


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints and writes the tables."""
    tables = (
        ("faults", fault_under_load.HEADER, _fault_rows),
        ("rolls", rollout_under_load.HEADER, _rollout_rows),
        ("gateways", gateway_under_load.HEADER, _gateway_rows),
    )
    for name, header, rows in tables:
        if rows:
            table = "\n".join([*header, *rows]) + "\n"
            _ARTIFACTS.mkdir(parents=True, exist_ok=True)
            (_ARTIFACTS / f"{name}.md").write_text(table)
            terminalreporter.write(f"\n{table}")
