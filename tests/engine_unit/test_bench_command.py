"""The engine's command line has `bench`; only this command imports the package rayloom_bench."""

import subprocess
import sys

import pytest

from rayloom_engine.cli.commands import run
from rayloom_engine.common.process import EXIT_CONFIG


def test_bench_without_its_package_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rayloom_bench", None)  # the import system then finds no such package

    assert run(["bench", "--help"]) == EXIT_CONFIG
    assert capsys.readouterr().err == (
        "rayloom-engine: `bench` needs the package rayloom-bench, which is not installed. "
        "Install it from Rayloom's repository with: pip install ./bench\n"
    )


def test_a_missing_dependency_of_the_benchmark_is_not_reported_as_a_missing_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "rayloom_bench", raising=False)
    monkeypatch.setitem(sys.modules, "rayloom_bench.command", None)

    with pytest.raises(ModuleNotFoundError, match=r"rayloom_bench\.command"):
        run(["bench", "--help"])


def test_the_other_commands_work_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rayloom_bench", None)

    for arguments in (["--help"], ["serve", "--help"]):
        with pytest.raises(SystemExit) as ended:
            run(arguments)
        assert ended.value.code == 0
    assert "measure throughput and latency" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "is_loaded"), [(["--help"], False), (["bench", "--help"], True)])
def test_the_package_is_loaded_when_its_command_runs(flags: list[str], is_loaded: bool) -> None:
    code = (
        "import atexit, sys; from rayloom_engine.cli.commands import run; "
        "atexit.register(lambda: print('rayloom_bench' in sys.modules)); run(sys.argv[1:])"
    )
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == str(is_loaded)


def test_help_shows_the_flags_and_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["bench", "--help"])

    shown = capsys.readouterr().out
    assert shown.startswith("usage: rayloom-engine bench [-h] [--url URL]")
    assert "  W1  32 requests, 16 at a time, 128 in / 64 out" in shown
