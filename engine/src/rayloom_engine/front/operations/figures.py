"""Metrics that handlers update: gauges, counters and histograms, cheap enough for every token of every stream.

The Counter and Histogram of prometheus_client take a lock for each observation, and cannot record several equal
observations in one call. They are too slow for a call at every token. The classes of this module count without a lock.
metrics.py gives their values to prometheus_client, which formats the answer of `/metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

Labels = tuple[tuple[str, str], ...]


class Family:
    """A metric: its name, its meaning and a value for each set of labels. For one event loop.

    Counters only rise; gauges are set. Labels are (name, value) pairs; `label_names` are the names, without the labels
    that all metrics have.
    """

    def __init__(self, kind: str, name: str, meaning: str, label_names: Sequence[str] = ()) -> None:
        self.kind = kind  # "gauge" | "counter" | "histogram"
        self.name = name
        self.meaning = meaning
        self.label_names = tuple(label_names)
        self._values: dict[Labels, float] = {}

    @property
    def values(self) -> Mapping[Labels, float]:
        return self._values

    def add(self, amount: float, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def count(self, amount: float) -> None:
        """Adds to a metric without labels, in half the time of `add`."""
        self._values[()] = self._values.get((), 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = value

    def clear(self) -> None:
        """Removes all values, for a gauge whose sets of labels change."""
        self._values.clear()

    def value(self, **labels: str) -> float:
        return self._values.get(tuple(labels.items()), 0.0)


class Histogram(Family):
    """Counts observations in buckets. `bounds`: the buckets' upper bounds, ascending."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        super().__init__("histogram", name, meaning)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def add_counts(self, counts: Sequence[int], total: float) -> None:
        """Adds observations that were counted elsewhere.

        `counts`: the number of observations in each bucket; the last bucket is for values above all bounds. `total`:
        the sum of the values.
        """
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> dict[str, int]:
        """Returns upper bound (as text, the last is +Inf) -> number of observations up to this bound."""
        bounds = (*map(_bound, self._bounds), "+Inf")
        return dict(zip(bounds, accumulate(self._counts), strict=True))


def _bound(value: float) -> str:
    """Formats a bound. Whole numbers get no ".0", as in earlier versions: another `le` would start new time series."""
    return str(int(value)) if value == int(value) else repr(value)
