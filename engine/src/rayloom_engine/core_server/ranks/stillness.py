"""Stillness: how long a computing thread has made no progress, and whether it hangs or computes a slow step.

    progress        half of a layer was computed, or another unit that the thread's owner counts
    sign of work    the thread's CPU time advanced
    hung            neither for `patience_s`, or no progress in _CAP x `patience_s` CPU seconds

A thread that uses CPU time is slow until the cap: half of a layer of a large chunk may take minutes on a small or busy
machine. A thread that is blocked or stopped uses none and is found after `patience_s`. The cap counts CPU seconds, so
that a slow thread on a machine with too many processes does not count as hung.

The forecast of a step may be far off, above all for the first large step after a start. It lengthens the patience to
_MOST_PATIENCE x hang_seconds at most, so a blocked thread is found within a minute by default whatever the forecast.
"""

from __future__ import annotations

_BUSY_SHARE = 0.05  # of a core: a thread that only wakes up to poll takes less
_CAP = 10.0
_MOST_PATIENCE = 6.0
_FORECAST_FACTOR = 5.0  # attention, sampling and cold caches are slower than the best step that was seen
_TRIAL_FACTOR = 4.0


def patience_s(hang_seconds: float, forecast_s: float, *, is_trial: bool) -> float:
    """Seconds without progress or sign of work after which a thread counts as hung.

    `forecast_s`: expected seconds of a layer in the present step. A hang in a trial of suspects is held against a
    request, so the patience is longer there.
    """
    patience = max(hang_seconds, min(_FORECAST_FACTOR * forecast_s, _MOST_PATIENCE * hang_seconds))
    return patience * (_TRIAL_FACTOR if is_trial else 1.0)


class Stillness:
    """Watches one thread. Call `observe` several times within the patience."""

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
        """Takes a sample. `mark` changes with every progress; None while no work is due. `cpu_s`: CPU time so far."""
        self._now = now
        if mark is None or mark != self._mark:
            self._mark = mark
            self._progress_at = self._work_at = now
            self._progress_cpu_s = cpu_s
        elif cpu_s != self._cpu_s and cpu_s - self._cpu_s >= _BUSY_SHARE * (now - self._cpu_changed_at):
            self._work_at = now
        if cpu_s != self._cpu_s:
            self._cpu_s = cpu_s
            self._cpu_changed_at = now

    def is_hung(self, patience_s: float) -> bool:
        """True if the thread hung at the last `observe`."""
        is_capped = self._cpu_s - self._progress_cpu_s > _CAP * patience_s
        return self._now - self._work_at > patience_s or is_capped
