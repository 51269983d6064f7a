"""Joins the ranks' reports about the files of needed adapters: one report for each adapter. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayloom_engine.core.adapter import AdapterReport


def joined(
    numbers: Iterable[int], reports_by_rank: Mapping[str, Iterable[AdapterReport]], world_size: int
) -> tuple[AdapterReport, ...]:
    """Returns a report for each adapter (by number) whose files all `world_size` ranks have, or that a rank cannot get.

    `reports_by_rank`: the reports of each attached rank; the key names the rank in the message of a problem.
    """
    problems_by_rank = {
        rank: {report.number: report.problem for report in reports} for rank, reports in reports_by_rank.items()
    }
    found = []
    for number in numbers:
        problems = {rank: of_rank[number] for rank, of_rank in problems_by_rank.items() if number in of_rank}
        first = next((f"{rank}: {problem}" for rank, problem in problems.items() if problem), "")
        if first or len(problems) == world_size:
            found.append(AdapterReport(number, first))
    return tuple(found)
