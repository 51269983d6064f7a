"""At most a few Jobs at a time inspect again the models that an operator of an earlier version inspected. Pure.

Their facts have no costs. Services that run need none, so their Jobs wait for each other and may fail; a service whose
sizing has to be computed waits for its own Job and for no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from rayloom_operator.names import ServiceKey

MOST_JOBS = 4
# A Job ends by its deadline. The reconciles of a service whose spec became invalid do not report that it ended.
JOB_SECONDS = 1800.0


class Refresh(Enum):
    """The progress of the second inspection of a service's model."""

    NONE = auto()  # its facts have costs, or it has no facts
    DUE = auto()  # no Job was made
    STARTING = auto()  # its Job is created now
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Refreshes:
    """The Jobs of all services.

    Each image of a service is tried once per process, because a second answer would be the same.
    """

    _since: dict[ServiceKey, float] = field(default_factory=dict)  # when its Job was first seen
    _tried: dict[ServiceKey, str] = field(default_factory=dict)  # the image that was tried last

    def found(self, keys: Iterable[ServiceKey], now: float) -> None:
        """Takes the services whose inspection ran when this process began to lead; `now` in seconds."""
        self._since |= dict.fromkeys(keys, now)

    def may_start(self, key: ServiceKey, image: str, now: float) -> bool:
        """Returns whether the service may have a Job with this image now."""
        running = sum(now - since < JOB_SECONDS for since in self._since.values())
        return self._tried.get(key) != image and running < MOST_JOBS

    def note(self, key: ServiceKey, image: str, refresh: Refresh, now: float) -> None:
        """Takes the progress of a service with this image, as the last reconcile found it."""
        if refresh in (Refresh.STARTING, Refresh.RUNNING):
            self._since.setdefault(key, now)
            self._tried[key] = image
        else:
            self._since.pop(key, None)

    def forget(self, key: ServiceKey) -> None:
        """Takes that the service was deleted."""
        self._since.pop(key, None)
        self._tried.pop(key, None)
