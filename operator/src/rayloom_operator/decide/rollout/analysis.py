"""Analysis: compares a new revision's first engine with the old engines over the same period. Pure.

The revision may fail before the end of the period. It fails as soon as its failed requests would be too many even if
all further requests up to `minRequests` succeeded. The time to the first token is judged only at the end of the period,
because the slowest of a few requests says little. A slow new engine may have fewer than `minRequests` requests at the
end of the period. If the old engines have enough requests at this time, the period is extended. Behind gateways, the
period is also extended if the new engine has fewer than `minRequests` requests and the old engines have at least one,
because gateways find a new engine only some time after it is available.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.spec import Analysis
from rayloom_operator.api.rollout.state import AnalysisWindow, RequestCounts
from rayloom_operator.times import moment

# If only the new revision has too few requests, the analysis lasts this many times holdSeconds.
MAX_HOLDS = 3
# The longest time, in seconds, from an engine's entry in an EndpointSlice until gateways send requests to the engine:
# CoreDNS caches an answer for 30 s, and gateways repeat the DNS query every second.
DISCOVERY_S = 35
_QUANTILE = 0.99


def total(each: Iterable[RequestCounts]) -> RequestCounts:
    """Returns the sum of the counts of several engines."""
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
    """Returns the requests counted between `begin` and `now`; all of `now` if an engine restarted and counts from 0."""
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


def longest_s(analysis: Analysis, *, is_behind_gateways: bool) -> int:
    """Returns the longest duration of an analysis, in seconds."""
    return max(MAX_HOLDS * analysis.hold_seconds, _found_hold_s(analysis) if is_behind_gateways else 0)


def is_over(
    window: AnalysisWindow,
    new: RequestCounts,
    old: RequestCounts,
    analysis: Analysis,
    wall: datetime,
    *,
    is_behind_gateways: bool = False,
) -> bool:
    """Returns True once the analysis has ended. The revision has passed if `problem` is empty at the end.

    `new` and `old` are the current counts, as for `problem`.
    """
    num_new = _num_first_tokens(since(window.new, new))
    old = since(window.old, old)
    has_few = num_new < analysis.min_requests
    has_only_old = has_few and _num_first_tokens(old) >= analysis.min_requests
    period_s = analysis.hold_seconds * (MAX_HOLDS if has_only_old else 1)
    if is_behind_gateways and has_few and old.requests:
        # The gateways may not have found the new engine yet, and so send all requests to the old engines.
        period_s = max(period_s, _found_hold_s(analysis))
    return wall >= moment(window.start_time) + timedelta(seconds=period_s)


def _found_hold_s(analysis: Analysis) -> int:
    """Returns holdSeconds plus the longest time in which gateways find the new engine; 0 if holdSeconds is 0."""
    return analysis.hold_seconds + DISCOVERY_S if analysis.hold_seconds else 0


def problem(
    window: AnalysisWindow, new: RequestCounts, old: RequestCounts, analysis: Analysis, *, is_over: bool
) -> str:
    """Returns why the new revision is not good enough, as a sentence; empty while no problem is found.

    `new` has the current counts of the new revision's engines, and `old` has the current counts of all other engines.
    """
    new = since(window.new, new)
    old = since(window.old, old)
    least = analysis.min_requests
    # Errors are divided by at least minRequests requests, for two reasons. First, 1 failure in 5 requests may yet
    # become 1 failure in 20. Second, a single failed request of the old revision must not excuse failures of the new
    # revision.
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
    # A histogram shows only the bucket of a quantile. The edges of a bucket may be 2.5 times apart, and nearly equal
    # times may fall into neighbouring buckets. So the lower edge of the new revision's bucket is compared with the
    # upper edge of the old revision's bucket.
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
