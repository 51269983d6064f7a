"""Compares the condition Available with the answers that a prober received at the same time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# The seconds for which the status may be wrong. The engine notices a hang after `hangSeconds` (6 in these tests). The
# operator reads the engine's status a second later, or several seconds later on a busy machine.
LATE_S = 20.0
NOTED_S = 4.0  # a status that is wrong for longer is noted in the timeline; after LATE_S it fails the test
# Seconds. The prober sends a request each second, so a longer pause between two answers ends a streak.
_STREAK_S = 3.0


def untrue_times(
    available: Sequence[tuple[float, bool]],
    answers: Sequence[float],
    since: float,
    until: float,
    late_s: float,
) -> list[str]:
    """In words: the periods of more than `late_s` seconds in which Available was wrong.

    `available` has each change of the condition with its time. `answers` has the times of a prober's answers, one a
    second while the service works. Only answers between `since` and `until` count. Available is wrong in two cases.
    Between two consecutive answers it is True for more than `late_s` in total. During a streak of answers it is False
    for more than `late_s` at once.
    """
    found = []
    ends = [at for at, _ in available[1:]] + [until]
    stretches = [(begin, end, is_true) for (begin, is_true), end in zip(available, ends, strict=True)]
    times = sorted(at for at in answers if since <= at <= until)
    for last, following in itertools.pairwise([since, *times, until]):
        pause = last, following
        seconds = sum(_overlap(pause, begin, end) for begin, end, is_true in stretches if is_true)
        if seconds > late_s:
            found.append(f"Available stood for {seconds:.1f} s without a token")
    for begin, end, is_true in stretches:
        for streak in _streaks(times):
            seconds = _overlap(streak, begin, end)
            if seconds > late_s and not is_true:
                found.append(f"Available was False for {seconds:.1f} s of tokens")
    return found


def _overlap(span: tuple[float, float], begin: float, end: float) -> float:
    """Seconds of the span between `begin` and `end`."""
    return max(0.0, min(span[1], end) - max(span[0], begin))


def _streaks(times: list[float]) -> list[tuple[float, float]]:
    """First and last time of each streak of answers."""
    found: list[tuple[float, float]] = []
    for at in times:
        if found and at - found[-1][1] <= _STREAK_S:
            found[-1] = found[-1][0], at
        else:
            found.append((at, at))
    return found
