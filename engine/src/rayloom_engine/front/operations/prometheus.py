"""The three metric kinds that we use, written in Prometheus' text format (version 0.0.4).

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

Labels = tuple[tuple[str, str], ...]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """A metric's name, meaning and samples. Counters only rise; gauges are set.

    Labels are (name, value) pairs; `label_names` are those that samples have beside the common ones.
    """

    def __init__(self, kind: str, name: str, meaning: str, label_names: Sequence[str] = ()) -> None:
        self.kind = kind
        self.name = name
        self.meaning = meaning
        self.label_names = tuple(label_names)
        self._values: dict[Labels, float] = {}

    def add(self, amount: float, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = value

    def value(self, **labels: str) -> float:
        return self._values.get(tuple(labels.items()), 0.0)

    def lines(self, common: Labels) -> Iterable[str]:
        for labels, value in self._values.items():
            yield _line(self.name, common + labels, value)


class Histogram(Family):
    """Counts observations in buckets; `bounds` are the upper bounds, ascending."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        super().__init__("histogram", name, meaning)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> dict[str, int]:
        """Upper bound as text -> observations up to it; the last bound is +Inf."""
        bounds = (*map(_number, self._bounds), "+Inf")
        return dict(zip(bounds, accumulate(self._counts), strict=True))

    def lines(self, common: Labels) -> Iterable[str]:
        total = 0
        for bound, total in self.cumulative().items():
            yield _line(f"{self.name}_bucket", (*common, ("le", bound)), total)
        yield _line(f"{self.name}_sum", common, self._sum)
        yield _line(f"{self.name}_count", common, total)


def exposition(families: Iterable[Family], common: Mapping[str, str]) -> str:
    """The text of all families; `common` labels go on every sample."""
    labels = tuple(common.items())
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.meaning}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines.extend(family.lines(labels))
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {_number(value)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
