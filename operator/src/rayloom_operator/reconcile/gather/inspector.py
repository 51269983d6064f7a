"""Reads the facts of a service's model from the service's status or from its inspection Jobs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rayloom_operator.api.spec import LLMService
from rayloom_operator.decide.inspection import Inspection, Tried, has_unfinished, inspect
from rayloom_operator.decide.refresh import Refreshes
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.failure_events import FailureEvents
from rayloom_operator.observe.watches import Watches
from rayloom_operator.times import Now

logger = logging.getLogger(__name__)


class Inspector:
    """Returns the state of models' inspections. Not thread-safe: used in one event loop."""

    def __init__(self, kube: Kube, settings: Settings, watches: Watches, events: FailureEvents) -> None:
        self._kube = kube
        self._settings = settings
        self._watches = watches
        self._events = events
        self._refreshes = Refreshes()

    def lead(self) -> None:
        """Notes the inspection Jobs that run when this process begins to lead."""
        jobs = self._watches.jobs
        running = [key for key in jobs.keys() if has_unfinished(jobs.of_service(key))]  # noqa: SIM118 - no dict
        self._refreshes.found(running, asyncio.get_running_loop().time())

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._refreshes.forget(key)

    async def inspect(self, key: ServiceKey, previous: Manifest, service: LLMService, now: Now) -> Inspection:
        """Returns the state of the model's inspection. `previous` is the last written status of the service.

        If a second inspection of the model has to begin (`decide.refresh`), creates its Job. No decision waits for that
        Job.
        """
        image, hub = self._settings.image(service), self._settings.hub
        jobs = [each for each in self._watches.jobs.of_service(key) if "deletionTimestamp" not in each["metadata"]]
        gives_no_costs = self._refreshes.gives_no_costs(key, image)
        tried = Tried(jobs, self._watches.pods.of_service(key), gives_no_costs=gives_no_costs)
        may_refresh = self._refreshes.may_start(key, image, now.mono)
        found = inspect(service, image, hub, previous, tried, now.wall, may_refresh)
        self._refreshes.note(key, image, found.refresh, now.mono)
        if found.is_costless:
            self._refreshes.note_costless(key, image)
        if found.refresh_job is not None:
            await self._create_refresh_job(key, found.refresh_job)
        if found.is_podless:
            failures = await self._events.job_failures(key)
        elif found.waiting:
            failures = await self._events.mount_failures(key, found.waiting)
        else:
            return found
        return inspect(service, image, hub, previous, replace(tried, failures=failures), now.wall)

    async def _create_refresh_job(self, key: ServiceKey, job: Manifest) -> None:
        """Creates the Job. A failure is only logged, because the service works with the stored facts.

        This process does not try again. The next operator process does.
        """
        try:
            await self._kube.create(job)
        except OperatorError as error:
            logger.warning("%s/%s: the Job that inspects the model again was not created: %s", *key, error)
