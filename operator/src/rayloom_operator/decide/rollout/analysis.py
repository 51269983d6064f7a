"""Whether the first engine of a new revision does as well as the old ones in the same time. Pure.

What fails real requests is seen before the time is over: once so many have failed that no run of good ones could make
up for it. How long first tokens take is judged at the end, for of few requests the slowest tells little. A new engine
that is much slower than the old ones gets few through while they get many: then the end comes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from rayloom_operator.api.rollout import Analysis, Figures, Window
from rayloom_operator.times import moment

MAX_HOLDS = 3  # A comparison for which only the new revision has too few requests goes on for so many holdSeconds.
_QUANTILE = 0.99


def total(each: Iterable[Figures]) -> Figures:
    """The sum over engines."""
    figures = list(each)
    edges = {edge for one in figures for edge in one.ttft}
    return Figures(
        requests=sum(one.requests for one in figures),
        errors=sum(one.errors for one in figures),
        ttft={edge: sum(one.ttft.get(edge, 0) for one in figures) for edge in sorted(edges, key=float)},
    )


def since(begin: Figures, now: Figures) -> Figures:
    """What was counted between two moments. Engines that start anew count from 0: then all they have is new."""
    pairs = [(begin.requests, now.requests), (begin.errors, now.errors)]
    pairs += [(number, now.ttft.get(edge, 0)) for edge, number in begin.ttft.items()]
    if any(before > after for before, after in pairs):
        return now
    return Figures(
        requests=now.requests - begin.requests,
        errors=now.errors - begin.errors,
        ttft={edge: number - begin.ttft.get(edge, 0) for edge, number in now.ttft.items()},
    )


def is_over(window: Window, new: Figures, old: Figures, asked: Analysis, clock: datetime) -> bool:
    """Whether the time is over; with the figures of now. What `problem` then has nothing against has passed."""
    begin, hold = moment(window.time), timedelta(seconds=asked.hold_seconds)
    num_new, num_old = (_num_first_tokens(each) for each in (since(window.new, new), since(window.old, old)))
    has_only_old = num_new < asked.min_requests <= num_old
    return clock >= begin + hold * (MAX_HOLDS if has_only_old else 1)


def problem(window: Window, new: Figures, old: Figures, asked: Analysis, *, is_over: bool) -> str:
    """Why the new revision is not good enough, as a sentence; empty while nothing speaks against it.

    `new` and `old` are what the engines of each have counted by now.
    """
    new, old = since(window.new, new), since(window.old, old)
    least = asked.min_requests
    # Few requests count as so many, of both: 1 error in 5 may become 1 in 20, and 1 in 1 of the old excuses nothing.
    percent, old_percent = (100 * each.errors / max(each.requests, least) for each in (new, old))
    if percent > asked.max_error_percent + old_percent:
        return (
            f"{new.errors} of {new.requests} requests failed in the new revision, {old.errors} of {old.requests} in "
            f"the old; {asked.max_error_percent} % more are allowed."
        )
    if not is_over or min(_num_first_tokens(new), _num_first_tokens(old)) < least:
        return ""
    (fast, _), (_, slow) = _quantile_bounds(new), _quantile_bounds(old)
    # A histogram knows only between which times it is. Neighbours may be 2.5 times apart and hold nearly equal times,
    # so only what is certain counts.
    if fast > asked.max_ttft_ratio * slow:
        return (
            f"99 % of first tokens take more than {fast:g} s in the new revision, and at most {slow:g} s in the old; "
            f"{asked.max_ttft_ratio:g} times as long is allowed."
        )
    return ""


def _num_first_tokens(figures: Figures) -> int:
    return max(figures.ttft.values(), default=0)


def _quantile_bounds(figures: Figures) -> tuple[float, float]:
    """The edges of the bucket in which the time is that 99 % of the requests keep to."""
    rank, lower = math.ceil(_QUANTILE * _num_first_tokens(figures)), 0.0
    for edge, number in sorted((float(edge), number) for edge, number in figures.ttft.items()):
        if number >= rank:
            return lower, edge
        lower = edge
    return lower, math.inf
