"""`rayloom-operator run`: kopf brings the LLMServices, the controller does the work, both in one event loop.

kopf is used for raw events alone: its other handlers write annotations and finalizers into every object. It cancels
the loop's other tasks when it ends, which is when ours are to end as well. The lease has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import platform
import signal
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import kopf
import uvloop

from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import Kube, KubeError, KubeUnreachable, login
from rayloom_operator.kube.lease import Lease
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME
from rayloom_operator.reconcile.controller import Controller
from rayloom_operator.resolve.resolved import Hub
from rayloom_operator.telemetry import logs
from rayloom_operator.telemetry.health import serving
from rayloom_operator.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_MIN_KEY_BYTES = 16
# The definition may be installed at the same moment as the operator.
_KIND_TIMEOUT_S = 60
_KIND_PATH = f"/apis/{API_GROUP}/{API_VERSION_NAME}"
# For passes that run when the operator is asked to stop, and then for the release of the lease.
_DRAIN_S = 5.0
_RELEASE_S = 2.0
# Thresholds of the garbage collector: new containers, and how many times as many until it looks at older ones.
_COLLECT = (20_000, 20, 10)
# kopf's: services that it lists at a time, and how long it keeps one, with a task of its own, after it was told.
_PAGE = 250
_IDLE_S = 0.1


def run_operator(
    *,
    engine_image: str,
    key_file: Path,
    previous_key_file: Path | None,
    namespace: str,
    health_port: int,
    log_level: str,
    log_format: str,
    watch_namespaces: Sequence[str],
    lease_namespace: str,
    lease_name: str,
    lease_seconds: int,
    hub_endpoint: str,
    hub_ca_config_map: str,
    host_paths: tuple[str, ...],
    hub_endpoints: bool,
    allowed_in_pod_templates: frozenset[str],
) -> None:
    """Runs until it is asked to stop. Raises OperatorError when it cannot start, and when it leads no more."""
    logs.set_up(log_level, log_format)
    hub = Hub(endpoint=hub_endpoint, allows_own=hub_endpoints, ca_config_map=hub_ca_config_map)
    permissions = Permissions(
        host_paths=host_paths, hub_endpoints=hub_endpoints, allowed_in_pod_templates=allowed_in_pod_templates
    )
    settings = Settings(
        engine_image=engine_image,
        operator_key=_operator_key(key_file),
        previous_key=_previous_key(previous_key_file),
        namespace=namespace,
        hub=hub,
        permissions=permissions,
    )
    metrics = Metrics()
    lease = Lease(
        namespace=lease_namespace,
        name=lease_name,
        # A restarted container is another candidate than the one before it.
        identity=f"{platform.node()}_{uuid.uuid4().hex[:8]}",
        seconds=lease_seconds,
        connect=lambda: Kube(on_request=metrics.count_request),
    )
    try:
        _collect_seldom()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, metrics, lease, health_port, watch_namespaces))
    except kopf.LoginError as error:
        raise OperatorError(str(error)) from error


def _collect_seldom() -> None:
    """Half the time of reading a page of objects would go into looking for garbage in what is read."""
    gc.collect()
    gc.freeze()  # the modules
    gc.set_threshold(*_COLLECT)


async def _run(settings: Settings, metrics: Metrics, lease: Lease, port: int, namespaces: Sequence[str]) -> None:
    loop, asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    kube = Kube(lease.may_write, metrics.count_request)
    stop, kind = asyncio.create_task(asked_to_stop.wait()), asyncio.create_task(_wait_for_kind(kube))
    tasks: list[asyncio.Task[Any]] = [stop, kind]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            return
        kind.result()
        leads = asyncio.Event()
        controller = Controller(kube, settings, namespaces=namespaces, leads=leads, metrics=metrics)
        metrics.gauge("leader", lease.may_write)
        work = asyncio.create_task(controller.run())
        tasks.append(work)
        probes = {"/healthz": controller.watches.problem, "/readyz": lambda: _readiness(controller)}
        async with serving(port, probes, metrics):
            leading = lease.run(lambda: loop.call_soon_threadsafe(leads.set))
            led = asyncio.create_task(asyncio.to_thread(asyncio.run, leading))
            services = asyncio.create_task(_take_services(controller, namespaces, asked_to_stop))
            tasks += [led, services]
            # None goes on without the others.
            ended, _ = await asyncio.wait({stop, work, led, services}, return_when=asyncio.FIRST_COMPLETED)
            if stop in ended:
                logger.info("asked to stop")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(controller.drain(), _DRAIN_S)
            work.cancel()
            lease.stop()
            await asyncio.wait([led], timeout=_RELEASE_S)
            for task in ended:
                task.result()
    finally:
        lease.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await kube.close()


async def _take_services(controller: Controller, namespaces: Sequence[str], asked_to_stop: asyncio.Event) -> None:
    """Hands every LLMService to the controller when it changes."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.chunk_size = _PAGE
    settings.queueing.idle_timeout = _IDLE_S
    settings.persistence.diffbase_storage = _NoDifferences()
    registry = kopf.OperatorRegistry()

    @kopf.on.event(API_GROUP, API_VERSION_NAME, API_PLURAL, registry=registry)
    async def changed(event: Mapping[str, Any], **_: Any) -> None:
        controller.set_service(dict(event["object"]), event["type"] == "DELETED")

    kopf.on.login(registry=registry)(login)
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=registry, settings=settings, standalone=True, clusterwide=not namespaces, namespaces=namespaces
    )
    # kopf has taken the signals, and would end at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    await kopf.run_tasks(tasks, ignored=others)
    raise OperatorError("kopf ended, and with it the news of LLMServices")


class _NoDifferences(kopf.DiffBaseStorage):
    """kopf would copy each document twice, for handlers that are told what has changed in it."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


def _readiness(controller: Controller) -> str:
    return "" if controller.watches.is_synced.is_set() else "the cluster's objects are not known yet"


async def _wait_for_kind(kube: Kube) -> None:
    """Returns once the API server knows LLMServices. Raises OperatorError when it does not."""
    for is_last in [False] * _KIND_TIMEOUT_S + [True]:
        try:
            await kube.get(_KIND_PATH)
            return
        except (KubeError, KubeUnreachable) as error:
            if is_last:
                if isinstance(error, KubeUnreachable):
                    raise OperatorError(f"the API server cannot be reached: {error}") from error
                cure = "install the definition in the folder crds"
                raise OperatorError(f"the cluster has no {API_PLURAL}: {cure} ({_KIND_PATH}: {error})") from error
            logger.info("waiting for %s: %s", _KIND_PATH, error)
        await asyncio.sleep(1)


def _operator_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise OperatorError(
            f"cannot read the operator's key {path}: {error.strerror}; name it with --key-file"
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise OperatorError(f"the key {path} has {len(key)} bytes; use {_MIN_KEY_BYTES} random ones or more")
    return key


def _previous_key(path: Path | None) -> bytes:
    """Empty where the key was never changed. The file may be missing: it is there while engines of that key run."""
    return b"" if path is None or not path.exists() else _operator_key(path)
