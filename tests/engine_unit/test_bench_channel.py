"""`rayloom-engine bench channel`: a short real run, and the table of given times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayloom_bench.control_channel import RAY, table
from rayloom_engine.cli.commands import run


def test_a_short_run_measures_three_kinds_of_round_trips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "channel", "--round-trips", "20", "--json", str(tmp_path / "found.json")]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[-3:] == ["shared memory", "TCP", RAY]
    found = json.loads((tmp_path / "found.json").read_text())["microseconds_p50_p99"]
    assert list(found) == rows[-3:]
    assert all(0 < median <= slow for median, slow in found.values())


def test_the_table_marks_the_goals_that_are_met() -> None:
    shown = table({"shared memory": [100e-6], "TCP": [251e-6], RAY: [500e-6]}).splitlines()
    assert shown[-3].split()[-5:] == ["100.0", "0.200", "<=", "0.2", "met"]
    assert shown[-2].split()[-4:] == ["0.502", "<=", "0.5", "MISSED"]
    assert shown[-1].split()[-3:] == ["500.0", "500.0", "1.000"]


def test_no_round_trips_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["bench", "channel", "--round-trips", "0"])
    assert "it must be 1 or more" in capsys.readouterr().err
