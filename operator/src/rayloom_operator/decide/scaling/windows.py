"""The windows over which the load of a service is averaged. Pure.

| window | length | use |
|---|---|---|
| panic window | `panic_s` | its mean adds engines at once |
| usual window | `window_s` | its mean adds engines |
| stable window | `stable_s`: several usual windows | the largest mean of these usual windows removes engines |

Samples begin with the last change of `replicas`, because earlier samples are about another number of engines. A
restarted operator has no samples, so it removes no engine before its samples cover the stable window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# The stable window is this many times as long as the start of the last engines took ...
_STARTS = 2
# ... but at most this many seconds. It is never shorter than `window_s`.
_MOST_S = 1800.0
_LEAST_SAMPLES = 2  # samples needed for the mean of the panic window
_PANIC_PART = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # seconds of a clock that only advances
    engines: float  # the load, see load.py
    is_complete: bool
    queue: float = 0.0  # the part of the load for waiting tokens

    def under(self, before_s: float, goal_s: float) -> Sample:
        """Returns the sample for another goal: the shorter the goal, the more engines the queue needs."""
        queue = self.queue * before_s / goal_s
        return replace(self, engines=self.engines - self.queue + queue, queue=queue)


@dataclass(frozen=True, slots=True)
class Windows:
    """The lengths of the windows in seconds."""

    window_s: float = 60.0

    @property
    def panic_s(self) -> float:
        return _PANIC_PART * self.window_s

    @property
    def sample_s(self) -> float:
        """Seconds between two samples."""
        return self.panic_s / 3

    def stable_s(self, start_s: float) -> float:
        """The length of the stable window. `start_s`: the seconds that engines take to start."""
        return max(self.window_s, min(_STARTS * start_s, _MOST_S))


def panic_mean(samples: Sequence[Sample], windows: Windows, now: float) -> float | None:
    """Returns the mean load of the panic window; None if there are fewer than two samples.

    If fewer than two of the samples are in the panic window, returns the mean of the last two samples.
    """
    if len(samples) < _LEAST_SAMPLES:
        return None
    recent = [each.engines for each in samples if each.at > now - windows.panic_s]
    if len(recent) < _LEAST_SAMPLES:
        recent = [each.engines for each in samples[-_LEAST_SAMPLES:]]
    return sum(recent) / len(recent)


def usual_mean(samples: Sequence[Sample], windows: Windows, now: float) -> float | None:
    """Returns the mean load of the usual window; None if the samples do not cover the window."""
    if not covers_window(samples, windows, now):
        return None
    recent = [each.engines for each in samples if each.at > now - windows.window_s]
    return sum(recent) / len(recent) if recent else None


def stable_peak(samples: Sequence[Sample], windows: Windows, start_s: float, now: float) -> float | None:
    """Returns the largest mean load of a usual window in the stable window.

    None if the samples do not cover the stable window, if a sample is incomplete, or if a usual window has no sample.
    """
    length_s = windows.stable_s(start_s)
    if not _covers(samples, length_s, windows, now):
        return None
    recent = [each for each in samples if each.at > now - length_s]
    if not all(each.is_complete for each in recent):
        return None
    parts: dict[int, list[float]] = {}
    num_parts = max(1, int(length_s // windows.window_s))
    for each in recent:
        index = min(int((now - each.at) // windows.window_s), num_parts - 1)
        parts.setdefault(index, []).append(each.engines)
    if len(parts) < num_parts:
        return None
    return max(sum(part) / len(part) for part in parts.values())


def covers_window(samples: Sequence[Sample], windows: Windows, now: float) -> bool:
    """Returns whether the samples cover the usual window."""
    return _covers(samples, windows.window_s, windows, now)


def _covers(samples: Sequence[Sample], seconds: float, windows: Windows, now: float) -> bool:
    """Returns whether the oldest sample is `seconds` old. The sample may be younger by half of `windows.sample_s`."""
    return bool(samples) and samples[0].at <= now - seconds + windows.sample_s / 2
