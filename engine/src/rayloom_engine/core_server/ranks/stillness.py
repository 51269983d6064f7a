"""Stillness: how long a computing thread has made no progress, and whether it hangs or is only slow.

    progress        half of a layer was computed, or another unit of work that the caller counts
    sign of work    the thread's CPU time has increased
    hung            no progress and no sign of work for `patience_s`, or no progress in _CAP x `patience_s` CPU seconds

A thread that uses CPU time counts as slow until the cap. On a small or busy machine, half of a layer may take minutes
for a large chunk. A thread that is blocked or stopped uses no CPU time and counts as hung after `patience_s`. The cap
is in CPU seconds: a machine with too many processes must not make a thread count as hung.

The forecast of a step may be far off, above all for the first large step after a start. So a forecast can raise
`patience_s` only to _MOST_PATIENCE x hang_seconds. By default, a blocked thread is found within a minute.
"""

from __future__ import annotations

_BUSY_SHARE = 0.05  # a thread that uses this share of a core is working; a thread that only wakes up to poll uses less
_CAP = 10.0
_MOST_PATIENCE = 6.0
_FORECAST_FACTOR = 5.0  # attention, sampling and cold caches may make a step slower than the best step so far
_TRIAL_FACTOR = 4.0


def patience_s(hang_seconds: float, forecast_s: float, *, is_trial: bool) -> float:
    """Returns the seconds without progress or sign of work after which a thread counts as hung.

    `forecast_s`: expected seconds for one layer in the present step. In a trial the result is larger, because a hang
    during a trial is blamed on a request.
    """
    patience = max(hang_seconds, min(_FORECAST_FACTOR * forecast_s, _MOST_PATIENCE * hang_seconds))
    return patience * (_TRIAL_FACTOR if is_trial else 1.0)


class Stillness:
    """Watches one thread. Call `observe` several times within each `patience_s`."""

    def __init__(self) -> None:
        self._mark: object = None  # the `mark` of the last `observe`
        self._now = 0.0
        self._progress_at = 0.0
        self._work_at = 0.0  # time of the last progress or sign of work
        self._cpu_s = 0.0
        self._cpu_changed_at = 0.0
        self._progress_cpu_s = 0.0

    @property
    def still_s(self) -> float:
        """Seconds since the last progress, by the clock of `observe`."""
        return self._now - self._progress_at

    @property
    def quiet_s(self) -> float:
        """Seconds since the last progress or sign of work, by the clock of `observe`."""
        return self._now - self._work_at

    def observe(self, now: float, mark: object, cpu_s: float) -> None:
        """Records the thread's progress and CPU time at time `now`.

        `mark`: a value that changes with every progress; None while the thread has no work. `cpu_s`: the thread's CPU
        time so far.
        """
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
        """True if the thread was hung at the time of the last `observe`."""
        is_capped = self._cpu_s - self._progress_cpu_s > _CAP * patience_s
        return self._now - self._work_at > patience_s or is_capped
