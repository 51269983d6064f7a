"""`rayloom-operator run`: kopf brings the LLMServices, the controller does the work, both in one event loop.

kopf is used for raw events alone: its other handlers write annotations and finalizers into every object. It cancels
the loop's other tasks when it ends, which is when ours are to end as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kopf

from rayloom_operator.controller import Controller
from rayloom_operator.errors import OperatorError
from rayloom_operator.kube import Kube, KubeError, KubeUnreachable, login
from rayloom_operator.names import API_GROUP, API_PLURAL, API_VERSION_NAME
from rayloom_operator.plan import Settings
from rayloom_operator.resolved import Hub

logger = logging.getLogger(__name__)

_MIN_KEY_BYTES = 16
# The definitions may be installed at the same moment as the operator.
_KINDS_TIMEOUT_S = 60
_KINDS = {
    f"/apis/{API_GROUP}/{API_VERSION_NAME}": f"{API_PLURAL}: install the chart's crds folder",
    "/apis/ray.io/v1": "rayclusters: install KubeRay 1.6 or newer",
}


def run_operator(
    *,
    engine_image: str,
    key_file: Path,
    health_port: int,
    log_level: str,
    hub_endpoint: str,
    hub_ca_config_map: str,
) -> None:
    """Runs until it is asked to stop. Raises OperatorError when it cannot start."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
    # kopf says of each event that it was handled, aiohttp of each look at /healthz.
    for name in ("kopf", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    hub = Hub(endpoint=hub_endpoint, ca_config_map=hub_ca_config_map)
    settings = Settings(engine_image=engine_image, operator_key=_operator_key(key_file), hub=hub)
    try:
        asyncio.run(_run(settings, health_port))
    except kopf.LoginError as error:
        raise OperatorError(str(error)) from error


async def _run(settings: Settings, health_port: int) -> None:
    kube = Kube()
    try:
        await _wait_for_kinds(kube)
        controller = Controller(kube, settings)
        # Neither goes on without the other.
        work = asyncio.create_task(controller.run())
        has_ended = asyncio.Event()
        work.add_done_callback(lambda _: has_ended.set())
        await controller.is_synced.wait()
        try:
            # From here on /healthz answers; one loop that hangs is enough for it to fall silent.
            await kopf.operator(
                registry=_registry(controller, work),
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=True,
                liveness_endpoint=f"http://0.0.0.0:{health_port}/healthz",
                stop_flag=has_ended,
            )
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
    finally:
        await kube.close()


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    return settings


def _registry(controller: Controller, work: asyncio.Task[None]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.event(API_GROUP, API_VERSION_NAME, API_PLURAL, registry=registry)
    async def changed(event: Mapping[str, Any], **_: Any) -> None:
        controller.set_service(dict(event["object"]), event["type"] == "DELETED")

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        work.cancel()  # kopf would wait 5 s for what it does not know.

    kopf.on.login(registry=registry)(login)
    return registry


async def _wait_for_kinds(kube: Kube) -> None:
    """Returns once the API server knows the kinds that the operator needs. Raises OperatorError when it does not."""
    for path, cure in _KINDS.items():
        for is_last in [False] * _KINDS_TIMEOUT_S + [True]:
            try:
                await kube.get(path)
                break
            except (KubeError, KubeUnreachable) as error:
                if is_last:
                    raise OperatorError(f"the cluster has no {cure} ({path}: {error})") from error
                logger.info("waiting for %s: %s", path, error)
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
