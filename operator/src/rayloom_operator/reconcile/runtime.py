"""Starts and stops the parts of the operator that run beside kopf: API client, Lease, controller, HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube, KubeError, KubeUnreachable
from rayloom_operator.kube.lease import Lease
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME
from rayloom_operator.reconcile.controller import Controller
from rayloom_operator.reconcile.llmgateway.controller import GatewayController
from rayloom_operator.telemetry.health import serving
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

# The CRD of LLMServices may be installed at the same moment as the operator, so the operator waits for the CRD.
_DEFINITION_TIMEOUT_S = 60
_DEFINITION_PATH = f"/apis/{API_GROUP}/{API_VERSION_NAME}"
# At shutdown: the longest wait for running reconciles, and then for the release of the Lease.
_DRAIN_S = 5.0
_RELEASE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """The settings of one operator process."""

    settings: Settings
    namespaces: tuple[str, ...]  # namespaces whose LLMServices are served; empty for all namespaces
    health_port: int
    lease_namespace: str
    lease_name: str
    lease_seconds: int
    max_reconciles: int  # services that are reconciled at once


class Runtime:
    """All parts of an operator process except kopf.

    Not thread-safe: used in one event loop. Started once and stopped once. `stop` sets `stopping`. If a part ends with
    an error, `stopping` is set as well, and `failure` has the error. The caller then has to call `stop`, to stop the
    other parts.
    """

    def __init__(self, settings: RuntimeSettings) -> None:
        self._settings = settings
        self._metrics = Metrics()
        self._lease = Lease(
            namespace=settings.lease_namespace,
            name=settings.lease_name,
            # The random part distinguishes this process from the container's earlier process, which had the same host
            # name and may have held the Lease.
            identity=f"{platform.node()}_{uuid.uuid4().hex[:8]}",
            seconds=settings.lease_seconds,
            connect=lambda: Kube(on_request=self._metrics.count_request),
        )
        self._parts = contextlib.AsyncExitStack()  # stopped in the reverse order of their start
        self.controller: Controller
        self.gateways: GatewayController
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None

    async def start(self) -> None:
        """Starts all parts. Returns once this process leads and reconciles. Raises OperatorError or kopf.LoginError."""
        try:
            await self._start()
        except BaseException as error:
            self._fail(error)
            await self.stop()
            raise

    async def stop(self) -> None:
        """Waits for running reconciles, releases the Lease and closes every connection."""
        self.stopping.set()
        await self._parts.aclose()

    async def _start(self) -> None:
        kube = Kube(self._lease.may_write, self._metrics.count_request)
        self._parts.push_async_callback(kube.close)
        await _wait_for_definition(kube)
        leads = asyncio.Event()
        self.controller = Controller(
            kube,
            self._settings.settings,
            namespaces=self._settings.namespaces,
            leads=leads,
            metrics=self._metrics,
            max_reconciles=self._settings.max_reconciles,
        )
        self.gateways = GatewayController(
            kube,
            self._settings.settings,
            self.controller.services_of,
            namespaces=self._settings.namespaces,
            metrics=self._metrics,
        )
        self.controller.on_service = self.gateways.note_service
        self.controller.watches.llmgateways_of = self.gateways.serving
        self._metrics.gauge("leader", self._lease.may_write)
        probes = {"/healthz": self._silence, "/readyz": self._unready}
        await self._parts.enter_async_context(serving(self._settings.health_port, probes, self._metrics))
        loop = asyncio.get_running_loop()
        leading = self._lease.run(lambda: loop.call_soon_threadsafe(leads.set))
        election = asyncio.create_task(self._run_part(asyncio.to_thread(asyncio.run, leading)))
        self._parts.push_async_callback(self._release, election)
        work = asyncio.create_task(self._run_part(self._work()))
        self._parts.push_async_callback(self._end, work)
        waits = {asyncio.create_task(each.wait()) for each in (self.controller.is_ready, self.stopping)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self.failure is not None:
            raise self.failure

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.run())
            await self.controller.is_ready.wait()
            tasks.create_task(self.gateways.run())

    def _silence(self) -> str:
        return self.controller.watches.problem() or self.gateways.problem()

    async def _run_part(self, part: Coroutine[Any, Any, None]) -> None:
        try:
            await part
        except Exception as error:  # noqa: BLE001 - an error of one part ends the process, which reports it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None and not isinstance(error, asyncio.CancelledError):
            self.failure = error
            self.stopping.set()

    def _unready(self) -> str:
        return "" if self.controller.watches.is_synced.is_set() else "the cluster's objects are not listed yet"

    async def _end(self, work: asyncio.Task[None]) -> None:
        if self.failure is None:
            logger.info("stopping: running reconciles end first")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(self.controller.drain(), self.gateways.drain()), _DRAIN_S)
        work.cancel()
        await asyncio.wait([work])

    async def _release(self, election: asyncio.Task[None]) -> None:
        self._lease.stop()
        await asyncio.wait([election], timeout=_RELEASE_S)
        election.cancel()


async def _wait_for_definition(kube: Kube) -> None:
    """Waits until the API server serves the kind LLMService. Raises OperatorError after a minute."""
    for is_last in [False] * _DEFINITION_TIMEOUT_S + [True]:
        try:
            await kube.get(_DEFINITION_PATH)
            return
        except KubeUnreachable as error:
            if is_last:
                raise OperatorError(f"the API server cannot be reached: {error}") from error
            logger.info("waiting for the API server: %s", error)
        except KubeError as error:
            if is_last:
                cure = "install the definition in the folder crds"
                raise OperatorError(f"the cluster has no {API_PLURAL}: {cure} ({_DEFINITION_PATH}: {error})") from error
            logger.info("waiting for %s: %s", _DEFINITION_PATH, error)
        await asyncio.sleep(1)
