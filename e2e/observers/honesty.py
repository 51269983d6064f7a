"""Whether a status told the truth, by what a prober saw at the same time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# How long the status may be wrong.
_LATE_S = 10.0
# A prober that gets an answer each second makes no longer pauses.
_STREAK_S = 3.0


def lies(available: Sequence[tuple[float, bool]], answers: Sequence[float], since: float, until: float) -> list[str]:
    """Where Available was wrong for more than 10 s, in words.

    `available` says since when it stood at what; `answers` are the times of a prober's successes from `since` to
    `until`, one a second while all is well. Between two successes it may not be True for so long in all, nor False in
    one piece while successes follow each other.
    """
    found = []
    ends = [at for at, _ in available[1:]] + [until]
    stretches = [(begin, end, is_true) for (begin, is_true), end in zip(available, ends, strict=True)]
    times = sorted(at for at in answers if since <= at <= until)
    for last, following in itertools.pairwise([since, *times, until]):
        pause = last, following
        seconds = sum(_overlap(pause, begin, end) for begin, end, is_true in stretches if is_true)
        if seconds > _LATE_S:
            found.append(f"Available stood for {seconds:.1f} s without a token")
    for begin, end, is_true in stretches:
        for streak in _streaks(times):
            seconds = _overlap(streak, begin, end)
            if seconds > _LATE_S and not is_true:
                found.append(f"Available was False for {seconds:.1f} s of tokens")
    return found


def _overlap(span: tuple[float, float], begin: float, end: float) -> float:
    """Seconds of the span between `begin` and `end`."""
    return max(0.0, min(span[1], end) - max(span[0], begin))


def _streaks(times: list[float]) -> list[tuple[float, float]]:
    """First and last of successes that follow each other."""
    found: list[tuple[float, float]] = []
    for at in times:
        if found and at - found[-1][1] <= _STREAK_S:
            found[-1] = found[-1][0], at
        else:
            found.append((at, at))
    return found
