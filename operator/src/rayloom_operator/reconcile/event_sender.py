"""Creates Kubernetes Events, and repeats those that the API server has not received."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube, KubeError
from rayloom_operator.names import Manifest, ServiceKey

logger = logging.getLogger(__name__)


class EventSender:
    """Keeps Events until they are created. Not thread-safe: used in one event loop."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._unsent: dict[ServiceKey, dict[str, Manifest]] = {}  # name of an Event -> the Event

    def forget(self, key: ServiceKey) -> None:
        """Drops the Events about a deleted object."""
        self._unsent.pop(key, None)

    def add(self, key: ServiceKey, events: Iterable[Manifest]) -> None:
        """Notes Events for the next `send`. An Event replaces an earlier Event of the same name."""
        self._unsent.setdefault(key, {}).update({each["metadata"]["name"]: each for each in events})

    async def send(self, key: ServiceKey) -> bool:
        """Creates the Events that are not created yet. Returns False if some have to be retried."""
        unsent = self._unsent.pop(key, {})
        for name, event in list(unsent.items()):
            try:
                await self._kube.create(event)
            except KubeError as error:
                logger.warning("%s/%s: the Event %s was refused: %s", *key, event["reason"], error)
            except OperatorError as error:
                logger.warning("%s/%s: the Event %s is retried: %s", *key, event["reason"], error)
                self._unsent.setdefault(key, {})[name] = event
        return key not in self._unsent
