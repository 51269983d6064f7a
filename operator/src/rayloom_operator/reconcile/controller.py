"""Receives the events of LLMServices and of their engines' objects, and reconciles each service that an event concerns.

    event of a service, RayCluster or pod, answer of an engine, timer  ->  work queue  ->  Reconciler.reconcile(service)

All events are handled in the same way. All state is in the cluster, so a restarted operator continues where the earlier
process stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.verdict import STALE_S
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.missed_deletions import MissedDeletions
from rayloom_operator.reconcile.reconciler import Reconciler
from rayloom_operator.reconcile.status_writer import StatusWriter
from rayloom_operator.reconcile.work_queue import WorkQueue
from rayloom_operator.telemetry.logs import SERVICE
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Interval of the search for engine replicas that stopped answering.
_SILENCE_CHECK_S = 5.0


class Controller:
    """Puts the services that events concern into the work queue, and reconciles the services in the queue.

    Not thread-safe: runs in one event loop. kopf passes events of LLMServices to `set_service`, and `Watches` delivers
    all other events of the cluster. Serves the LLMServices of `namespaces` (empty: of all namespaces). Reconciles
    nothing until `leads` is set.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        namespaces: Sequence[str] = (),
        leads: asyncio.Event | None = None,
        metrics: Metrics | None = None,
        max_reconciles: int = 4,
    ) -> None:
        self._leads = leads
        self.is_ready = asyncio.Event()
        self._metrics = metrics or Metrics()
        self._metrics.gauge("queue_depth", lambda: self._queue.depth)
        self._metrics.gauge("engines_polled", lambda: self._poller.num_engines)
        self._metrics.follow(self._conditions, lambda: self._poller.num_failures)
        self._services: PackedDict[ServiceKey, Known] = PackedDict(Known.of)
        self._unreported: dict[ServiceKey, str] = {}  # uids of listed services without an event from kopf yet
        # Called with each service that was reported, changed or deleted.
        self.on_service: Callable[[ServiceKey], None] = lambda key: None
        # The queue is opened when this process leads. During the wait for the Lease, an open queue would grow with
        # every service that ever existed.
        self._queue = WorkQueue(max_reconciles, is_open=False, on_wait=self._metrics.waited)
        self._poller = EnginePoller(self._queue.add, lambda: self._queue.depth)
        self.watches = Watches(
            kube,
            namespaces,
            on_change=self._queue.add,
            on_pod=self._pod_changed,
            on_node=self._node_changed,
            on_kuberay=self._kuberay_changed,
        )
        self.missed_deletions = MissedDeletions(kube, namespaces, self._uids, self._delete_service)
        self._drift = Drift(kube, self._queue.add, namespaces=namespaces)
        statuses = StatusWriter(kube, self._services, self._metrics, self.set_service, self._edited)
        self._reconciler = Reconciler(
            kube,
            settings,
            watches=self.watches,
            poller=self._poller,
            drift=self._drift,
            statuses=statuses,
            requeue_after=self._queue.add_after,
        )

    def set_service(self, document: Manifest, is_deleted: bool) -> None:
        """Handles an event of an LLMService. A terminating service counts as deleted."""
        meta = without_managed_fields(document)["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._services.mark(key)
        self._unreported.pop(key, None)
        if is_deleted or "deletionTimestamp" in meta:
            self._delete_service(key, meta["uid"])
        # Skips events that are not newer than the stored document. When this process writes a status, it stores the
        # document before the event of that write arrives.
        elif known is None or int(meta["resourceVersion"]) > known.version:
            self._services[key] = document
            is_changed = known is None or known.generation != meta["generation"]
            self._queue.add(key, is_changed=is_changed, is_new=known is None)
        # Also called for a skipped event: the event of a status that this process wrote brings nothing new to store.
        self.on_service(key)

    def _delete_service(self, key: ServiceKey, uid: str) -> None:
        self._unreported.pop(key, None)
        known = self._services.mark(key)
        # If the known uid differs, the service was recreated, and stays. kopf may report the deletion after the
        # recreation.
        if known is None or known.uid == uid:
            self._services.pop(key, None)
            self._queue.add(key, is_changed=True)
        self.on_service(key)

    def services_of(self, namespace: str) -> tuple[Manifest, ...] | None:
        """Returns the LLMServices of a namespace; None while some of them were listed but not reported yet."""
        if any(key[0] == namespace for key in self._unreported):
            return None
        return tuple(self._services[key] for key in self._services if key[0] == namespace)

    async def run(self) -> None:
        """Runs until it is cancelled. `set_service` may be called once `is_ready` is set."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.watches.run())
                # A reconcile before the watches are in sync would create objects that already exist.
                await self.watches.is_synced.wait()
                if self._leads is not None:
                    await self._leads.wait()
                    await self.watches.relist()
                for reflector in self._drift.reflectors:
                    tasks.create_task(reflector.run())
                await self._drift.listed()
                self._unreported = await self.missed_deletions.list_uids()
                self._reconciler.lead()
                self._queue.open()
                self.is_ready.set()
                tasks.create_task(self.missed_deletions.run())
                tasks.create_task(self._watch_silence())
                tasks.create_task(self._queue.work(self._metrics.measured(self._reconcile)))
        finally:
            self._reconciler.close()
            await self._poller.close()

    async def drain(self) -> None:
        """Starts no more reconciles, and returns when the running reconciles have ended."""
        await self._queue.drain()

    def _conditions(self) -> Iterator[tuple[str, str]]:
        """Returns (type, status) of each condition of each service."""
        return chain.from_iterable(each.conditions for each in self._services.marks())

    def _uids(self) -> dict[ServiceKey, str]:
        """Returns the uids of all known services, and of listed services that kopf has not reported yet."""
        known = {key: mark.uid for key in self._services if (mark := self._services.mark(key))}
        return self._unreported | known

    def _edited(self, key: ServiceKey) -> None:
        self._queue.add(key, is_changed=True)

    def _kuberay_changed(self) -> None:
        for key in self._services:
            self._queue.add(key, is_changed=True)

    def _pod_changed(self, key: ServiceKey) -> None:
        self._poller.nudge(key)
        self._queue.add(key)

    def _node_changed(self, name: str) -> None:
        for key in self.watches.pods.marked(name) & self._services.keys():
            self._queue.add(key)

    async def _watch_silence(self) -> None:
        """Queues services whose engine replicas stopped answering: the next regular reconcile may be minutes away."""
        while True:
            await asyncio.sleep(_SILENCE_CHECK_S)
            for key in self._poller.silent(asyncio.get_running_loop().time() - STALE_S):
                self._queue.add(key)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        SERVICE.set("/".join(key))
        document = self._services.get(key)
        if document is None and key in self._unreported:
            return None  # kopf has not reported this service yet; its first event will queue it again
        if document is None:
            # The service is deleted. Kubernetes deletes its objects by their owner references.
            return await self._reconciler.forget(key)
        try:
            return await self._reconciler.reconcile(key, document)
        except OperatorError as error:
            logger.warning("%s/%s: %s; requeued", *key, error)
            raise
        except Exception:
            logger.exception("%s/%s: this is an error in the operator; requeued", *key)
            raise
