"""Summaries of one figure over the rounds of a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Minimum, median and maximum over the rounds."""

    smallest: float
    median: float
    largest: float


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of the values, or None if there are no values."""
    listed = list(values)
    if not listed:
        return None
    return Spread(smallest=min(listed), median=statistics.median(listed), largest=max(listed))


def quotients(numerators: Mapping[int, float], denominators: Mapping[int, float]) -> list[float]:
    """The quotients of the rounds that both maps have, in the order of the rounds."""
    return [numerators[key] / denominators[key] for key in sorted(numerators.keys() & denominators.keys())]
