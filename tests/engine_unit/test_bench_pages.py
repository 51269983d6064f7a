"""`bench pages`: the parts that it runs, and their summary. A failed part does not stop the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayloom_bench import pages
from rayloom_bench.command import SUBCOMMANDS
from rayloom_bench.pages import PARTS, parse_parts, summary_line
from rayloom_engine.cli.commands import run


def test_every_part_is_a_command_of_the_bench_and_has_a_page_of_its_own() -> None:
    assert {part.name for part in PARTS} < set(SUBCOMMANDS)
    assert sorted(part.page for part in PARTS) == ["int8.md", "parallel.md", "peers.md", "quantised.md", "step.md"]
    whole, short = (PARTS[0].command(Path("/d"), is_short=is_short) for is_short in (False, True))
    assert whole == [sys.executable, "-m", "rayloom_engine", "bench", "step", "--page", "/d"]
    assert short == [*whole, "--repeats", "1"]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("is_short", [False, True])
def test_the_flags_of_a_part_are_known_to_its_command(part: pages.Part, is_short: bool) -> None:
    import argparse

    from rayloom_bench.command import add_flags

    parser = argparse.ArgumentParser()
    arguments = part.command(Path("/d"), is_short=is_short)[4:]
    add_flags(parser, arguments)
    assert parser.parse_args(arguments).page == Path("/d")


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    assert [part.name for part in parse_parts("peers, step")] == ["step", "peers"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ["--parts", "step,disk"],
            "--parts: 'step,disk' given; name one or more of step, parallel, quality, quantised, ",
        ),
        (["--page", "/no/such/place"], "--page: the folder /no/such does not exist; make it first"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "pages", *flags]) == 78
    assert reason in capsys.readouterr().err


def test_a_summary_has_the_page_or_the_exit_code() -> None:
    assert summary_line(PARTS[0], 61.4, 0) == "step           61 s  step.md"
    assert summary_line(PARTS[0], 0.6, 1) == "step            1 s  FAILED with exit code 1"


def test_a_failed_part_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(part: pages.Part, folder: Path, *, is_short: bool) -> list[str]:
        code = 3 if part.name == "step" else 0
        return [sys.executable, "-S", "-c", f"open({str(folder / part.page)!r}, 'w'); raise SystemExit({code})"]

    monkeypatch.setattr(pages.Part, "command", command)
    assert run(["bench", "pages", "--parts", "step,peers", "--page", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["step", "peers"]
    assert printed[0].endswith("FAILED with exit code 3") and printed[1].endswith("peers.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers.md", "step.md"]
