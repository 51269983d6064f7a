"""The comparison of a new revision's first engine with the old engines in the same time. Pure.

Failed requests fail the revision before the time is over: once so many have failed that no run of good ones could make
up for them. The time to the first token is judged at the end, because the slowest of few requests tells little. A new
engine that is much slower than the old ones answers few requests while they answer many: then the end comes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.spec import Analysis
from rayloom_operator.api.rollout.state import AnalysisWindow, RequestCounts
from rayloom_operator.times import moment

# A comparison in which only the new revision has too few requests lasts for so many times holdSeconds.
MAX_HOLDS = 3
_QUANTILE = 0.99


def total(each: Iterable[RequestCounts]) -> RequestCounts:
    """Returns the sum over engines."""
    counts = list(each)
    edges = {edge for one in counts for edge in one.first_token_seconds}
    return RequestCounts(
        requests=sum(one.requests for one in counts),
        errors=sum(one.errors for one in counts),
        first_token_seconds={
            edge: sum(one.first_token_seconds.get(edge, 0) for one in counts) for edge in sorted(edges, key=float)
        },
    )


def since(begin: RequestCounts, now: RequestCounts) -> RequestCounts:
    """Returns the requests between two counts; all of `now` where an engine restarted, and so counts from 0 again."""
    pairs = [(begin.requests, now.requests), (begin.errors, now.errors)]
    pairs += [(number, now.first_token_seconds.get(edge, 0)) for edge, number in begin.first_token_seconds.items()]
    if any(before > after for before, after in pairs):
        return now
    return RequestCounts(
        requests=now.requests - begin.requests,
        errors=now.errors - begin.errors,
        first_token_seconds={
            edge: number - begin.first_token_seconds.get(edge, 0) for edge, number in now.first_token_seconds.items()
        },
    )


def is_over(window: AnalysisWindow, new: RequestCounts, old: RequestCounts, analysis: Analysis, wall: datetime) -> bool:
    """Returns True once the comparison ends, given the counts of now. Without a `problem` the revision has passed."""
    begin = moment(window.start_time)
    hold = timedelta(seconds=analysis.hold_seconds)
    num_new = _num_first_tokens(since(window.new, new))
    num_old = _num_first_tokens(since(window.old, old))
    has_only_old = num_new < analysis.min_requests <= num_old
    return wall >= begin + hold * (MAX_HOLDS if has_only_old else 1)


def problem(
    window: AnalysisWindow, new: RequestCounts, old: RequestCounts, analysis: Analysis, *, is_over: bool
) -> str:
    """Returns why the new revision is not good enough, as a sentence; empty while nothing speaks against it.

    `new` and `old` are the counts of now, of the engines of the new revision and of all others.
    """
    new = since(window.new, new)
    old = since(window.old, old)
    least = analysis.min_requests
    # Fewer than minRequests count as so many, in both: 1 error in 5 may become 1 in 20, and 1 in 1 of the old excuses
    # nothing.
    percent = 100 * new.errors / max(new.requests, least)
    old_percent = 100 * old.errors / max(old.requests, least)
    if percent > analysis.max_error_percent + old_percent:
        return (
            f"{new.errors} of {new.requests} requests failed in the new revision, {old.errors} of {old.requests} in "
            f"the old; {analysis.max_error_percent} % more are allowed."
        )
    if not is_over or min(_num_first_tokens(new), _num_first_tokens(old)) < least:
        return ""
    fast, _ = _quantile_bounds(new)
    _, slow = _quantile_bounds(old)
    # A histogram gives the quantile only between two edges. Neighbouring edges may be 2.5 times apart, and hold nearly
    # equal times, so the new revision's lower edge is compared with the old one's upper edge.
    if fast > analysis.max_ttft_ratio * slow:
        return (
            f"99 % of first tokens take more than {fast:g} s in the new revision, and at most {slow:g} s in the old; "
            f"{analysis.max_ttft_ratio:g} times as long is allowed."
        )
    return ""


def _num_first_tokens(counts: RequestCounts) -> int:
    return max(counts.first_token_seconds.values(), default=0)


def _quantile_bounds(counts: RequestCounts) -> tuple[float, float]:
    """Returns the edges in seconds of the bucket that holds the 99th percentile of the time to the first token."""
    rank = math.ceil(_QUANTILE * _num_first_tokens(counts))
    lower = 0.0
    for edge, number in sorted((float(edge), number) for edge, number in counts.first_token_seconds.items()):
        if number >= rank:
            return lower, edge
        lower = edge
    return lower, math.inf
