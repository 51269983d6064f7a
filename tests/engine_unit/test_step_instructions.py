"""The comparison of counted instructions with the recorded numbers (`make bench-check`)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from step_instructions.check import NUMBERS, WORKLOADS, compiler_of, losses, main, no_record


def test_a_step_may_need_ten_percent_more_and_not_one_instruction_beyond() -> None:
    assert losses({"decode": 1000}, {"decode": 1100}) == []
    assert losses({"decode": 1000}, {"decode": 1101}) == [
        "decode: 1,101 instructions a step, 10.1 % more than the 1,000 on file"
    ]


def test_each_workload_is_compared_with_its_own_number() -> None:
    found = losses({"decode": 1000, "prefill": 9000}, {"decode": 1500, "prefill": 9001})
    assert [line.split(":")[0] for line in found] == ["decode"]


def test_a_workload_without_a_number_is_a_failure() -> None:
    assert losses({}, {"decode": 1}) == ["decode: no number is on file; run with --record"]


@given(before=st.integers(1, 10**9), count=st.integers(1, 10**9))
def test_fewer_instructions_are_never_a_loss(before: int, count: int) -> None:
    assert (losses({"decode": before}, {"decode": count}) == []) is (count <= before * 1.1)


def test_the_file_has_a_number_of_each_compiler_for_each_workload() -> None:
    on_file = json.loads(NUMBERS.read_text())
    assert on_file
    for compiler, counts in on_file.items():
        assert "GCC: " in compiler or "clang version " in compiler
        assert sorted(counts) == sorted(WORKLOADS)
        assert all(count > 100_000 for count in counts.values())


def test_the_library_names_its_compiler() -> None:
    gcc = b"\x7fELF..GCC: (Debian 12.2.0-14) 12.2.0\0more\0GCC: (Debian 12.2.0-14) 12.2.0\0"
    assert compiler_of(gcc) == "GCC: (Debian 12.2.0-14) 12.2.0"
    assert compiler_of(b"\0Debian clang version 14.0.6\0" + gcc) == (
        "Debian clang version 14.0.6 and GCC: (Debian 12.2.0-14) 12.2.0"
    )
    with pytest.raises(ValueError, match="names no compiler"):
        compiler_of(b"\x7fELF GCC")


def test_a_compiler_without_numbers_is_told_which_ones_have_some_and_how_to_record() -> None:
    text = no_record("GCC: (x) 13.1", {"GCC: (x) 12.2": {}, "clang version 14": {}})
    assert "no numbers for 'GCC: (x) 13.1', only for 'GCC: (x) 12.2', 'clang version 14'" in text
    assert "make bench-check ARGS=--record" in text


def test_a_compiler_without_numbers_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0GCC: (Other) 99.1\0")
    monkeypatch.setenv("RAYLOOM_CPU_LIBRARY", str(library))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for tool in ("valgrind", "c++"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr("sys.argv", ["check.py"])
    assert main() == 1
    printed = capsys.readouterr()
    assert "compiled by 'GCC: (Other) 99.1'" in printed.out
    assert "no numbers for 'GCC: (Other) 99.1'" in printed.err


def test_a_missing_valgrind_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "library.so"
    library.touch()
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("RAYLOOM_CPU_LIBRARY", str(library))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["check.py"])
    assert main() == 1
    assert "needs valgrind" in capsys.readouterr().err
