"""Stillness: how long a thread that computes has made no progress, and whether that is a hang or a slow step.

    progress        a half of a layer was computed, or whatever else its owner counts
    sign of work    the thread's CPU time advanced
    hung            neither for `patience_s`, or no progress in _CAP x `patience_s` CPU seconds

A thread that burns CPU is slow until the cap: a large chunk on a small or busy machine keeps one half of a layer for
minutes. A thread that is blocked or stopped burns none, and is found after `patience_s`. The cap counts CPU seconds, so
that a machine with too many processes does not turn slow into hung.

The forecast may be far off, above all for the first large step after a start, so it lengthens the patience up to
_MOST_PATIENCE x hang_seconds: a thread that blocks is found within a minute by default, whatever was forecast.
"""

from __future__ import annotations

_BUSY_SHARE = 0.05  # of a core: a thread that only wakes up to poll takes less
_CAP = 10.0
_MOST_PATIENCE = 6.0
_FORECAST_FACTOR = 5.0  # attention, sampling and cold caches are slower than the best step that was seen
_TRIAL_FACTOR = 4.0


def patience_s(hang_seconds: float, forecast_s: float, *, is_trial: bool) -> float:
    """Seconds without progress or sign of work after which a thread counts as hung.

    `forecast_s`: what a layer of the present step should take. A hang in a trial of suspects is held against a request,
    so there the patience is longer.
    """
    patience = max(hang_seconds, min(_FORECAST_FACTOR * forecast_s, _MOST_PATIENCE * hang_seconds))
    return patience * (_TRIAL_FACTOR if is_trial else 1.0)


class Stillness:
    """Of one thread. `observe` it several times within the patience."""

    def __init__(self) -> None:
        self._mark: object = None  # the last progress
        self._now = 0.0
        self._progress_at = 0.0
        self._work_at = 0.0  # when progress or a sign of work was last seen
        self._cpu_s = 0.0
        self._cpu_changed_at = 0.0
        self._progress_cpu_s = 0.0

    @property
    def still_s(self) -> float:
        """Seconds since the last progress, by the clock of `observe`."""
        return self._now - self._progress_at

    @property
    def quiet_s(self) -> float:
        """Seconds since the last progress or sign of work, by the same clock."""
        return self._now - self._work_at

    def observe(self, now: float, mark: object, cpu_s: float) -> None:
        """`mark` changes with every progress; None while nothing is to be done. `cpu_s`: CPU time of the thread."""
        self._now = now
        if mark is None or mark != self._mark:
            self._mark = mark
            self._progress_at = self._work_at = now
            self._progress_cpu_s = cpu_s
        elif cpu_s != self._cpu_s and cpu_s - self._cpu_s >= _BUSY_SHARE * (now - self._cpu_changed_at):
            self._work_at = now
        if cpu_s != self._cpu_s:
            self._cpu_s, self._cpu_changed_at = cpu_s, now

    def is_hung(self, patience_s: float) -> bool:
        """As of the last `observe`."""
        is_capped = self._cpu_s - self._progress_cpu_s > _CAP * patience_s
        return self._now - self._work_at > patience_s or is_capped
