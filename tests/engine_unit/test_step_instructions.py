"""The comparison of counted instructions with those on file (`make bench-check`)."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from step_instructions.check import NUMBERS, WORKLOADS, losses


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


def test_the_file_has_a_number_for_each_workload() -> None:
    on_file = json.loads(NUMBERS.read_text())
    assert sorted(on_file["instructions"]) == sorted(WORKLOADS)
    assert all(count > 100_000 for count in on_file["instructions"].values())
