"""Compares the results of our server with those of vLLM, test by test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peer_tests.suites import NOT_APPLICABLE

PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one test on one server."""

    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A test with both outcomes."""

    test: str
    ours: Result
    theirs: Result

    @property
    def file(self) -> str:
        return self.test.split("::", 1)[0]

    @property
    def is_owed(self) -> bool:
        """True if vLLM passes the test and our server does not."""
        return self.theirs.outcome == PASSED and self.ours.outcome in (FAILED, ABSENT)


def read_results(lines: Iterable[str]) -> dict[str, Result]:
    """Returns the results of one column. A test has failed if any of its phases has."""
    results: dict[str, Result] = {}
    for line in lines:
        record = json.loads(line)
        known = results.get(record["test"])
        if known is None or known.outcome != FAILED:
            results[record["test"]] = Result(record["outcome"], record["message"])
    return results


def compare(ours: Mapping[str, Result], theirs: Mapping[str, Result]) -> list[Comparison]:
    """Returns the tests that apply, in the order of their names."""
    absent = Result(ABSENT)
    return [
        Comparison(test, ours.get(test, absent), theirs.get(test, absent))
        for test in sorted({*ours, *theirs})
        if not any(part in test for part in NOT_APPLICABLE)
    ]


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns a Markdown table: passed and failed tests of each file on both servers, and what is owed."""
    rows = ["| file | tests | ours pass | vLLM passes | vLLM passes, ours does not |", "|---|---|---|---|---|"]
    files = sorted({each.file for each in comparisons})
    for file in files:
        rows.append(_row(file.removeprefix("tests/"), [each for each in comparisons if each.file == file]))
    rows.append(_row("**all**", comparisons))
    return "\n".join(rows)


def owed(comparisons: Sequence[Comparison]) -> str:
    """Returns a Markdown list of the tests that only vLLM passes, each with the end of its failure here."""
    lines = []
    for each in comparisons:
        if each.is_owed:
            last = each.ours.message.strip().splitlines()
            lines.append(f"- `{each.test.removeprefix('tests/')}`: {last[-1][:160] if last else each.ours.outcome}")
    return "\n".join(lines)


def _row(name: str, tests: Sequence[Comparison]) -> str:
    ours = sum(each.ours.outcome == PASSED for each in tests)
    theirs = sum(each.theirs.outcome == PASSED for each in tests)
    return f"| {name} | {len(tests)} | {ours} | {theirs} | {sum(each.is_owed for each in tests)} |"
