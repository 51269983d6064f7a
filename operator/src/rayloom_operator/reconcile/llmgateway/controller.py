"""Watches LLMGateways and their objects, and reconciles each LLMGateway that an event concerns.

    event of an LLMGateway, of its objects, or of an LLMService of its namespace  ->  work queue  ->  GatewayReconciler

The operator watches LLMGateways itself, and not with kopf. So the operator also works without their CRD, for example
after an upgrade that did not install the CRD. If the CRD is installed later, the operator finds it within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from rayloom_operator.api.llmgateway.spec import KIND
from rayloom_operator.api.spec import API_VERSION
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched, llmgateway_of, own_key
from rayloom_operator.names import LLMGATEWAY_LABEL, Manifest, ServiceKey
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import ServingGateway
from rayloom_operator.observe.pods import staying_pods
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.observe.watches import silence
from rayloom_operator.reconcile.llmgateway.reconciler import GatewayReconciler, ServicesOf
from rayloom_operator.reconcile.work_queue import WorkQueue
from rayloom_operator.telemetry.logs import SERVICE
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# Seconds between an event of an LLMService and the reconcile of an LLMGateway: services that start together cause one
# reconcile.
_COLLECT_S = 0.5
_MAX_RECONCILES = 2
_GATEWAYS = Watched(api_version=API_VERSION, kind=KIND, selector={}, key_of=own_key)
_PODS = Watched(
    api_version="v1",
    kind="Pod",
    selector={"labelSelector": LLMGATEWAY_LABEL},
    shape=shapes.PodFields,
    key_of=llmgateway_of,
    slim=shapes.pod,
)


class GatewayController:
    """Reconciles LLMGateways while `run` runs. The caller starts `run` when this process becomes the leader.

    Not thread-safe: used in one event loop. `services_of`: see `ServicesOf`. The caller reports each event of an
    LLMService to `note_service`.
    """

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        services_of: ServicesOf,
        *,
        namespaces: Sequence[str] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._queue = WorkQueue(_MAX_RECONCILES, is_open=False)
        reflect = partial(Reflector, kube, namespaces=namespaces)
        self._gateways = reflect(_GATEWAYS, self._gateway_changed)
        self._pods = reflect(_PODS, self._queue.add)
        self._drift = Drift(kube, self._queue.add, namespaces=namespaces, label=LLMGATEWAY_LABEL)
        self._in_namespace: dict[str, set[ServiceKey]] = {}
        self._poller = EnginePoller(self._queue.add)
        self._reconciler = GatewayReconciler(
            kube,
            settings,
            services_of=services_of,
            pods_of=self._pods.of_service,
            drift=self._drift,
            poller=self._poller,
        )

    def note_service(self, key: ServiceKey) -> None:
        """Queues every LLMGateway of an LLMService's namespace: each may select the service, or have selected it."""
        for each in self._in_namespace.get(key[0], ()):
            self._queue.add_after(each, _COLLECT_S)

    def serving(self, service: ServiceKey) -> tuple[ServingGateway, ...] | None:
        """Returns the LLMGateways whose pods send requests to an LLMService.

        Returns None while some LLMGateways of the namespace are unknown, as after a restart. In a cluster without the
        kind LLMGateway, the result is empty.
        """
        if not self._gateways.was_tried.is_set():
            return None
        found = []
        for key in sorted(self._in_namespace.get(service[0], ())):
            served = self._reconciler.served(key)
            if served is None:
                return None
            if service[1] in served.models:
                found.append(
                    ServingGateway(
                        name=key[1],
                        uid=served.uid,
                        model=served.models[service[1]],
                        replicas=served.replicas,
                        pods=staying_pods(self._pods.of_service(key)),
                    )
                )
        return tuple(found)

    async def run(self) -> None:
        """Watches and reconciles until it is cancelled. While the CRD is missing, only retries to list LLMGateways."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start(tasks)
        finally:
            await self._poller.close()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._gateways.run())
        await self._gateways.is_synced.wait()
        for reflector in (self._pods, *self._drift.reflectors):
            tasks.create_task(reflector.run())
        await self._drift.listed()
        await self._pods.was_tried.wait()
        self._queue.open()
        for key in {key for keys in self._in_namespace.values() for key in keys}:
            self._queue.add(key)
        tasks.create_task(self._queue.work(self._metrics.measured(self._reconcile)))

    async def drain(self) -> None:
        """Starts no more reconciles, and returns when the running reconciles have ended."""
        await self._queue.drain()

    def problem(self) -> str:
        """Returns which watches have had no event and no failure for too long; empty if none."""
        if not self._gateways.is_synced.is_set() or not self._pods.is_synced.is_set():
            return ""
        return silence((self._gateways, self._pods))

    def _gateway_changed(self, key: ServiceKey) -> None:
        in_namespace = self._in_namespace.pop(key[0], set())
        # A terminating LLMGateway is not reconciled. If `in_namespace` contained such an LLMGateway, `serving` would
        # return None for each service of the namespace until the LLMGateway is gone.
        if any(not _is_terminating(each) for each in self._gateways.of_service(key)):
            in_namespace.add(key)
        else:
            in_namespace.discard(key)
        if in_namespace:
            self._in_namespace[key[0]] = in_namespace
        self._queue.add(key, is_changed=True)

    async def _reconcile(self, key: ServiceKey) -> float | None:
        SERVICE.set("/".join(key))
        found = self._gateways.of_service(key)
        if not found or _is_terminating(found[0]):
            self._reconciler.forget(key)
            return None
        try:
            return await self._reconciler.reconcile(key, found[0])
        except OperatorError as error:
            logger.warning("%s %s/%s: %s; requeued", KIND, *key, error)
            raise
        except Exception:
            logger.exception("%s %s/%s: this is an error in the operator; requeued", KIND, *key)
            raise


def _is_terminating(document: Manifest) -> bool:
    return "deletionTimestamp" in document["metadata"]
