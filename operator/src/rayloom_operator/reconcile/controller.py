"""Takes the events of LLMServices and of the objects of their engines, and reconciles each service that changed.

    event of a service, RayCluster or pod, answer of an engine, timer  ->  work queue  ->  Reconciler.reconcile(service)

Every event takes the same path. All memory is in the cluster, so a restarted operator continues where the last stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from itertools import chain

from rayloom_operator.api.spec import API_VERSION, KIND
from rayloom_operator.decide.plan import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.packed import PackedDict
from rayloom_operator.kube.reflector import without_managed_fields
from rayloom_operator.names import Manifest, ServiceKey, object_path
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.verdict import STALE_S
from rayloom_operator.observe.watches import Watches
from rayloom_operator.reconcile.known import Known
from rayloom_operator.reconcile.reconciler import Reconciler
from rayloom_operator.reconcile.status_writer import StatusWriter
from rayloom_operator.reconcile.work_queue import WorkQueue
from rayloom_operator.telemetry.logs import SERVICE
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# kopf may miss that a service was deleted, while its watch is broken.
_RELIST_S = 300.0
# How soon a list that failed is asked for again.
_SOON_S = 1.0
_SILENCE_LOOK_S = 5.0


class Controller:
    """Lives in one event loop. `set_service` is how it learns of LLMServices.

    It looks at `namespaces`, at all of them where there are none, and changes nothing before `leads` is set.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        namespaces: Sequence[str] = (),
        leads: asyncio.Event | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._leads = leads
        self._metrics = metrics or Metrics()
        self._metrics.gauge("queue_depth", lambda: self._queue.depth)
        self._metrics.gauge("engines_polled", lambda: self._poller.num_engines)
        self._metrics.gauge("concurrency", lambda: kube.concurrency.value)
        self._metrics.follow(self._conditions, lambda: self._poller.num_failures)
        self._services: PackedDict[ServiceKey, Known] = PackedDict(Known.of)
        # Opened when it leads: a standby would gather the keys of all services that ever were.
        self._queue = WorkQueue(lambda: kube.concurrency.value, is_open=False, on_wait=self._metrics.waited)
        self._poller = EnginePoller(self._queue.add, lambda: self._queue.depth)
        self.watches = Watches(
            kube,
            namespaces,
            on_change=self._queue.add,
            on_pod=self._pod_changed,
            on_node=self._node_changed,
            on_kuberay=self._kuberay_changed,
        )
        self._clusters, self._pods = self.watches.clusters, self.watches.pods
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
        # While services are listed: the versions of those that went meanwhile, which later pages may still have.
        self._gone: dict[ServiceKey, int] | None = None

    def set_service(self, document: Manifest, is_deleted: bool) -> None:
        """Takes what kopf saw of an LLMService, unless something newer is known of it or of one made anew."""
        meta = without_managed_fields(document)["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._services.mark(key)
        is_gone, version = is_deleted or "deletionTimestamp" in meta, int(meta["resourceVersion"])
        if known and version < known.version:
            return
        if not is_gone and self._gone and version <= self._gone.get(key, 0):
            return
        if not is_gone and known and version == known.version:
            return  # the echo of a status that this operator wrote
        if is_gone and known and known.uid != meta["uid"]:
            return
        if is_gone:
            self._services.pop(key, None)
            if self._gone is not None:
                self._gone[key] = version
        else:
            self._services[key] = document
        is_new = not is_gone and not known
        self._queue.add(key, is_changed=is_gone or not known or known.generation != meta["generation"], is_new=is_new)

    async def run(self) -> None:
        """Works until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.watches.run())
                # Before that, what exists would look like something to make.
                await self.watches.is_synced.wait()
                if self._leads is not None:
                    await self._leads.wait()
                    stale = (self._clusters, self._pods, self.watches.endpoints)
                    await asyncio.gather(self._list_services(), *(each.relist() for each in stale))
                tasks.create_task(self._relist())
                for reflector in self._drift.reflectors:
                    tasks.create_task(reflector.run())
                await self._drift.listed()
                self._queue.open(self._services)
                tasks.create_task(self._watch_silence())
                tasks.create_task(self._queue.work(self._metrics.measured(self._reconcile)))
        finally:
            self._reconciler.close()
            await self._poller.close()

    async def drain(self) -> None:
        """Begins no more passes, and returns when those that run are over."""
        await self._queue.drain()

    def _conditions(self) -> Iterator[tuple[str, str]]:
        """(type, status) of every condition of every service."""
        return chain.from_iterable(each.conditions for each in self._services.marks())

    async def _relist(self) -> None:
        while True:
            await asyncio.sleep(_RELIST_S)
            await self._list_services()

    async def _list_services(self) -> None:
        """What this process was told while it did not lead may be older than what the leader has done since."""
        self._gone = {}
        for namespace in self._namespaces or ("",):
            while True:
                before = {key: self._services.mark(key) for key in self._services if namespace in ("", key[0])}
                try:
                    async for items, _ in self._kube.pages(object_path(API_VERSION, KIND, namespace), {}):
                        for document in items:
                            before.pop((document["metadata"]["namespace"], document["metadata"]["name"]), None)
                            self.set_service(document, False)
                    break
                except OperatorError as error:
                    logger.warning("the services cannot be listed: %s; trying again", error)
                    await asyncio.sleep(_SOON_S)
            for key, known in before.items():
                # What was told meanwhile is newer than the list.
                if known and self._services.mark(key) == known:
                    self.set_service(self._services[key], True)
        self._gone = None

    def _edited(self, key: ServiceKey) -> None:
        self._queue.add(key, is_changed=True)

    def _kuberay_changed(self) -> None:
        for key in self._services:
            self._queue.add(key, is_changed=True)

    def _pod_changed(self, key: ServiceKey) -> None:
        self._poller.nudge(key)
        self._queue.add(key)

    def _node_changed(self, name: str) -> None:
        for key in self._pods.marked(name) & self._services.keys():
            self._queue.add(key)

    async def _watch_silence(self) -> None:
        """Services that are well have no turn of their own that would find an engine of which nothing is heard."""
        while True:
            await asyncio.sleep(_SILENCE_LOOK_S)
            for key in self._poller.silent(asyncio.get_running_loop().time() - STALE_S):
                self._queue.add(key)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        SERVICE.set("/".join(key))
        document = self._services.get(key)
        if document is None:
            # Its objects go by their owner references.
            return await self._reconciler.forget(key)
        try:
            return await self._reconciler.reconcile(key, document)
        except OperatorError as error:
            logger.warning("%s/%s: %s; trying again", *key, error)
            raise
        except Exception:
            logger.exception("%s/%s: this is a mistake in the operator; trying again", *key)
            raise
