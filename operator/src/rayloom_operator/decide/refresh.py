"""Limits the second inspections: Jobs for models whose facts an earlier operator stored without costs. Pure.

A service with a valid sizing does not need the costs. So its Job may fail, and may wait for the Jobs of other services.
A service whose sizing has to be computed needs the costs. Its Job is no second inspection, and does not wait for other
Jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from rayloom_operator.names import ServiceKey
from rayloom_operator.objects.inspect_job import DEADLINE_SECONDS

MOST_JOBS = 4  # second inspections at once


class Refresh(Enum):
    """The progress of the second inspection of a service's model."""

    NONE = auto()  # no second inspection is needed
    DUE = auto()  # the stored facts have no costs, and no Job may be created now
    STARTING = auto()  # the Job is to be created now
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Refreshes:
    """The running Jobs of all services.

    An operator process tries each image of a service only once, because a second Job would give the same answer.
    """

    _since: dict[ServiceKey, float] = field(default_factory=dict)  # the time at which the running Job was first seen
    _tried: dict[ServiceKey, str] = field(default_factory=dict)  # the image that was tried last
    _costless: dict[ServiceKey, str] = field(default_factory=dict)  # the image whose inspection gave no costs

    def found(self, keys: Iterable[ServiceKey], now: float) -> None:
        """Notes the services whose Jobs were running when this process became the leader; `now` in seconds."""
        self._since |= dict.fromkeys(keys, now)

    def may_start(self, key: ServiceKey, image: str, now: float) -> bool:
        """Returns whether a Job with this image may be started for the service now."""
        # While a service's spec is invalid, no reconcile notes the end of the service's Job. So each Job counts only
        # until its deadline.
        running = sum(now - since < DEADLINE_SECONDS for since in self._since.values())
        return self._tried.get(key) != image and running < MOST_JOBS

    def gives_no_costs(self, key: ServiceKey, image: str) -> bool:
        """Returns whether an inspection of the service's model with this image gave no costs."""
        return self._costless.get(key) == image

    def note_costless(self, key: ServiceKey, image: str) -> None:
        """Notes that an inspection of the service's model with this image gave no costs."""
        self._costless[key] = image

    def note(self, key: ServiceKey, image: str, refresh: Refresh, now: float) -> None:
        """Notes the progress that the last reconcile found. `image`: the image of the service's Job."""
        if refresh in (Refresh.STARTING, Refresh.RUNNING):
            self._since.setdefault(key, now)
            self._tried[key] = image
        else:
            self._since.pop(key, None)

    def forget(self, key: ServiceKey) -> None:
        """Drops everything about a deleted service."""
        self._since.pop(key, None)
        self._tried.pop(key, None)
        self._costless.pop(key, None)
