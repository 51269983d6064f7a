"""The trend of memory over a soak. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Caches and restarted processes cause noise of this size, so smaller growth is ignored.
MOST_GROWTH = 0.05
LEAST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A straight line through samples of MiB over seconds."""

    mean_mib: float
    mib_per_hour: float
    error_mib_per_hour: float  # standard error of the slope
    hours: float
    num_samples: int

    @property
    def verdict(self) -> str:
        """Returns "GROWS" if the growth exceeds MOST_GROWTH of the mean and also twice the standard error, else "flat".

        With fewer than LEAST_SAMPLES samples, the verdict is "too few samples".
        """
        if self.num_samples < LEAST_SAMPLES:
            return "too few samples"
        growth = self.mib_per_hour * self.hours
        is_certain = self.mib_per_hour > 2 * self.error_mib_per_hour
        return "GROWS" if is_certain and growth > MOST_GROWTH * self.mean_mib else "flat"


def trend(samples: Sequence[tuple[float, float]]) -> Trend:
    """Returns the line of least squares through (seconds, MiB)."""
    if len({at_s for at_s, _ in samples}) < 3:
        mean = statistics.fmean(mib for _, mib in samples) if samples else 0.0
        return Trend(mean_mib=mean, mib_per_hour=0.0, error_mib_per_hour=0.0, hours=0.0, num_samples=len(samples))
    hours = [at_s / 3600 for at_s, _ in samples]
    mibs = [mib for _, mib in samples]
    slope, intercept = statistics.linear_regression(hours, mibs)
    squares = sum((mib - slope * at - intercept) ** 2 for at, mib in zip(hours, mibs, strict=True))
    spread = sum((at - statistics.fmean(hours)) ** 2 for at in hours)
    return Trend(
        mean_mib=statistics.fmean(mibs),
        mib_per_hour=slope,
        error_mib_per_hour=math.sqrt(squares / (len(samples) - 2) / spread),
        hours=max(hours) - min(hours),
        num_samples=len(samples),
    )
