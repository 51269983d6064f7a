"""Limits the Jobs that inspect a model again because an earlier version of the operator stored no costs. Pure.

A running service does not need the costs, so its Job may wait for those of other services, and may fail. A service
whose sizing has yet to be computed needs them, and its Job waits for no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from rayloom_operator.names import ServiceKey
from rayloom_operator.objects.inspect_job import DEADLINE_SECONDS

MOST_JOBS = 4


class Refresh(Enum):
    """The progress of the second inspection of a service's model."""

    NONE = auto()  # its facts have costs, or it has no facts
    DUE = auto()  # its facts have no costs, and it has no Job yet
    STARTING = auto()  # its Job is to be created now
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Refreshes:
    """The running Jobs of all services.

    An operator process tries each image of a service only once, because a second Job would give the same answer.
    """

    _since: dict[ServiceKey, float] = field(default_factory=dict)  # when its Job was first seen
    _tried: dict[ServiceKey, str] = field(default_factory=dict)  # the image that was tried last
    _costless: dict[ServiceKey, str] = field(default_factory=dict)  # the image whose inspection gave no costs

    def found(self, keys: Iterable[ServiceKey], now: float) -> None:
        """Notes the services whose Jobs were running when this process became the leader; `now` in seconds."""
        self._since |= dict.fromkeys(keys, now)

    def may_start(self, key: ServiceKey, image: str, now: float) -> bool:
        """Returns whether a Job with this image may be started for the service now."""
        # After its deadline no Job runs. Its end is not noticed while the service's spec is invalid.
        running = sum(now - since < DEADLINE_SECONDS for since in self._since.values())
        return self._tried.get(key) != image and running < MOST_JOBS

    def gives_no_costs(self, key: ServiceKey, image: str) -> bool:
        """Returns whether the engine of this image has inspected the service's model without costs."""
        return self._costless.get(key) == image

    def note_costless(self, key: ServiceKey, image: str) -> None:
        """Takes that the engine of this image has inspected the service's model without costs."""
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
