"""Compares the results of our server with those of a peer, test by test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PASSED, FAILED, SKIPPED, ABSENT = "passed", "failed", "skipped", "absent"
STARTED, UNSERVED = "started", "unserved"
# The end of a skipped test's message, which pytest writes as a tuple.
_SKIP_REASON = re.compile(r"Skipped: (.+?)[\"']\)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one test on one server."""

    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A test with both outcomes. `exception`: the cause of our failure if it will not be fixed, else empty."""

    test: str
    ours: Result
    theirs: Result
    exception: str = ""

    @property
    def file(self) -> str:
        return self.test.split("::", 1)[0]

    @property
    def is_theirs_alone(self) -> bool:
        """True if the peer passes the test and our server does not, for example because the test was skipped here."""
        return self.theirs.outcome == PASSED and self.ours.outcome != PASSED

    @property
    def is_owed(self) -> bool:
        return self.is_theirs_alone and not self.exception


def read_results(lines: Iterable[str]) -> dict[str, Result]:
    """Returns the results of one column: the last run of each test. A test has failed if any of its phases has failed.

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
    """Returns the tests that apply, in the order of their names.

    If `exceptions` has no cause for a test that was skipped on our server, the reason of the skip is the cause.
    """
    absent = Result(ABSENT)
    comparisons = []
    for test in sorted({*ours, *theirs}):
        if not _first(not_applicable, test):
            result = ours.get(test, absent)
            cause = _first(exceptions, test) or _skip_reason(result)
            comparisons.append(Comparison(test, result, theirs.get(test, absent), cause))
    return comparisons


def unused(causes: Mapping[str, str], comparisons: Iterable[Comparison]) -> list[str]:
    """Returns the superfluous keys of `causes`: parts of test ids that match no test that only the peer passes."""
    alone = [each.test for each in comparisons if each.is_theirs_alone]
    return [part for part in causes if not any(_names(part, test) for test in alone)]


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
    """Returns the cause of the first part that names the test; empty if no part names it."""
    return next((cause for part, cause in causes.items() if _names(part, test)), "")


def _names(part: str, test: str) -> bool:
    """True if the test's id contains the part, up to the end of a word: `test_a` does not name `test_a_long`."""
    return re.search(re.escape(part) + r"(?!\w)", test) is not None


def _skip_reason(result: Result) -> str:
    found = _SKIP_REASON.search(result.message) if result.outcome == SKIPPED else None
    return found[1] if found else ""


def _row(name: str, tests: Sequence[Comparison]) -> str:
    ours = sum(each.ours.outcome == PASSED for each in tests)
    theirs = sum(each.theirs.outcome == PASSED for each in tests)
    owed = sum(each.is_owed for each in tests)
    return (
        f"| {name} | {len(tests)} | {ours} | {theirs} | {owed} | {sum(each.is_theirs_alone for each in tests) - owed} |"
    )
