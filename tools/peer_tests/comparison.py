"""Compares the results of our server with those of a peer, test by test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
STARTED, UNSERVED = "started", "unserved"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one test on one server."""

    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A test with both outcomes. `exception`: the cause of a failure here that will not be mended, or empty."""

    test: str
    ours: Result
    theirs: Result
    exception: str = ""

    @property
    def file(self) -> str:
        return self.test.split("::", 1)[0]

    @property
    def is_theirs_alone(self) -> bool:
        """True if the peer passes the test and our server does not."""
        return self.theirs.outcome == PASSED and self.ours.outcome in (FAILED, ABSENT)

    @property
    def is_owed(self) -> bool:
        return self.is_theirs_alone and not self.exception


def read_results(lines: Iterable[str]) -> dict[str, Result]:
    """Returns the results of one column: the last run of each test, which has failed if any of its phases has.

    Tests that no server answered, or that were interrupted, are left out.
    """
    results: dict[str, Result] = {}
    for line in lines:
        record = json.loads(line)
        test = record["test"]
        if record["outcome"] in (STARTED, UNSERVED):
            results.pop(test, None)
        elif test not in results or results[test].outcome != FAILED:
            results[test] = Result(record["outcome"], record["message"])
    return results


def compare(
    ours: Mapping[str, Result],
    theirs: Mapping[str, Result],
    *,
    not_applicable: Mapping[str, str],
    exceptions: Mapping[str, str],
) -> list[Comparison]:
    """Returns the tests that apply, in the order of their names."""
    absent = Result(ABSENT)
    return [
        Comparison(test, ours.get(test, absent), theirs.get(test, absent), _first(exceptions, test))
        for test in sorted({*ours, *theirs})
        if not _first(not_applicable, test)
    ]


def table(comparisons: Sequence[Comparison], peer: str) -> str:
    """Returns a Markdown table of each file's tests: passed on each server, passed by the peer alone, exceptions."""
    rows = [f"| file | tests | ours pass | {peer} passes | owed | exceptions |", "|---|---|---|---|---|---|"]
    for file in sorted({each.file for each in comparisons}):
        rows.append(_row(file.removeprefix("tests/"), [each for each in comparisons if each.file == file]))
    rows.append(_row("**all**", comparisons))
    return "\n".join(rows)


def listed(comparisons: Sequence[Comparison]) -> str:
    """Returns Markdown lists: tests that the peer alone passes, each with the end of its failure; exceptions with
    causes."""
    owed = [f"- `{_short(each)}`: {_end(each.ours)}" for each in comparisons if each.is_owed]
    excepted = [
        f"- `{_short(each)}`: {each.exception}" for each in comparisons if each.is_theirs_alone and each.exception
    ]
    parts = [("Owed: only the peer passes", owed), ("Exceptions, with causes", excepted)]
    return "\n\n".join(f"{title}:\n\n" + "\n".join(lines) for title, lines in parts if lines)


def _short(each: Comparison) -> str:
    return each.test.removeprefix("tests/")


def _end(result: Result) -> str:
    lines = result.message.strip().splitlines()
    return lines[-1][:160] if lines else result.outcome


def _first(causes: Mapping[str, str], test: str) -> str:
    """Returns the cause of the first part that the test's id has; empty if it has none."""
    return next((cause for part, cause in causes.items() if part in test), "")


def _row(name: str, tests: Sequence[Comparison]) -> str:
    ours = sum(each.ours.outcome == PASSED for each in tests)
    theirs = sum(each.theirs.outcome == PASSED for each in tests)
    owed = sum(each.is_owed for each in tests)
    return (
        f"| {name} | {len(tests)} | {ours} | {theirs} | {owed} | {sum(each.is_theirs_alone for each in tests) - owed} |"
    )
