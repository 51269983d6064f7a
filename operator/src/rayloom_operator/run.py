"""`rayloom-operator run`: kopf brings the LLMServices, our own thread does the work.

kopf cancels what it does not know in its event loop, so the controller has a thread and a loop of its own. kopf is
used for raw events alone: its other handlers write annotations and finalizers into every object.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kopf

from rayloom_operator.controller import Controller
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube import Kube, KubeError, KubeUnreachable, login
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME
from rayloom_operator.plan import Settings

logger = logging.getLogger(__name__)

_MIN_KEY_BYTES = 16
# The definitions may be installed at the same moment as the operator.
_KINDS_TIMEOUT_S = 60.0
_KINDS = {
    f"/apis/{API_GROUP}/{API_VERSION_NAME}": f"{API_PLURAL}: install the chart's crds folder",
    "/apis/ray.io/v1": "rayclusters: install KubeRay 1.6 or newer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The command's flags."""

    engine_image: str
    key_file: Path
    health_port: int
    log_level: str


def run_operator(options: RunOptions) -> int:
    """Runs until it is asked to stop; the exit code. Raises OperatorError when it cannot start."""
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    # kopf says of each event that it was handled, aiohttp of each look at /healthz.
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    settings = Settings(engine_image=options.engine_image, operator_key=_operator_key(options.key_file))
    try:
        asyncio.run(_wait_for_kinds())
    except kopf.LoginError as error:
        raise OperatorError(str(error)) from error
    worker = _Worker(settings)
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.scanning.disabled = True
    kopf.run(
        registry=_registry(worker),
        settings=kopf_settings,
        standalone=True,
        clusterwide=True,
        liveness_endpoint=f"http://0.0.0.0:{options.health_port}/healthz",
        stop_flag=worker.has_ended,
    )
    return 1 if worker.is_broken else 0


def _registry(worker: _Worker) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    def start(**_: Any) -> None:
        worker.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await asyncio.to_thread(worker.stop)

    @kopf.on.event(API_GROUP, API_VERSION_NAME, API_PLURAL, registry=registry)
    def changed(event: Mapping[str, Any], **_: Any) -> None:
        worker.set_service(dict(event["object"]), event["type"] == "DELETED")

    kopf.on.login(registry=registry)(login)
    return registry


class _Worker:
    """The controller in its thread."""

    def __init__(self, settings: Settings) -> None:
        self.has_ended = threading.Event()
        self.is_broken = False  # it ended although nobody asked it to
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._controller: Controller | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller")

    def start(self) -> None:
        self._thread.start()
        self._is_ready.wait()

    def stop(self) -> None:
        if self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def set_service(self, document: dict[str, Any], is_deleted: bool) -> None:
        if self._controller is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._controller.set_service, document, is_deleted)

    def _run(self) -> None:
        try:
            self._task = self._loop.create_task(self._work())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException:
            self.is_broken = True
            logger.exception("the controller broke; the operator ends")
            raise
        finally:
            self._is_ready.set()
            self._loop.close()
            self.has_ended.set()

    async def _work(self) -> None:
        kube = Kube()
        try:
            self._controller = Controller(kube, self._settings)
            self._is_ready.set()
            await self._controller.run()
        finally:
            await kube.close()


async def _wait_for_kinds() -> None:
    """Returns once the API server knows the kinds that the operator needs. Raises OperatorError when it does not."""
    kube = Kube()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _KINDS_TIMEOUT_S
    try:
        for path, cure in _KINDS.items():
            while True:
                try:
                    await kube.get(path)
                    break
                except (KubeError, KubeUnreachable) as error:
                    if loop.time() > deadline:
                        raise OperatorError(f"the cluster has no {cure} ({path}: {error})") from error
                    logger.info("waiting for %s: %s", path, error)
                await asyncio.sleep(1)
    finally:
        await kube.close()


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
