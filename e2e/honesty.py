"""Whether a status told the truth, by what a prober saw at the same time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# How long the status may be wrong.
_LATE_S = 10.0
# A prober that gets an answer each second makes no longer pauses.
_STREAK_S = 3.0


def lies(available: Sequence[tuple[float, bool]], answers: Sequence[float], until: float) -> list[str]:
    """Where Available was wrong for more than 10 s, in words.

    `available` says since when it stood at what; `answers` are the times of a prober's successes, one a second while
    all is well. It may not be True for so long after the last success, nor False while successes follow each other.
    """
    found = []
    ends = [at for at, _ in available[1:]] + [until]
    times = sorted(answers)
    for (begin, is_available), end in zip(available, ends, strict=True):
        if is_available:
            for last, following in itertools.pairwise([*times, until]):
                seconds = min(following, end) - max(last, begin)
                if seconds > _LATE_S:
                    found.append(f"Available stood for {seconds:.1f} s without a token")
        else:
            for first, last in _streaks(times):
                seconds = min(last, end) - max(first, begin)
                if seconds > _LATE_S:
                    found.append(f"Available was False for {seconds:.1f} s of tokens")
    return found


def _streaks(times: list[float]) -> list[tuple[float, float]]:
    """First and last of successes that follow each other."""
    found: list[tuple[float, float]] = []
    for at in times:
        if found and at - found[-1][1] <= _STREAK_S:
            found[-1] = found[-1][0], at
        else:
            found.append((at, at))
    return found
