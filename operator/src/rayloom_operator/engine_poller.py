"""Asks engines for their /status, each at its own pace, and tells when an answer matters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from rayloom_operator.engine_status import EngineStatus, engine_status
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.names import ADMIN_PORT
from rayloom_operator.observed import Reading
from rayloom_operator.reflector import ServiceKey
from rayloom_operator.status import TOKEN_AGE_LIMIT_S

_SERVING_INTERVAL_S = 5.0
_OTHER_INTERVAL_S = 1.0
# Of the interval: pods change several times in a moment, and each change asks.
_MIN_INTERVAL_S = 0.3
_TIMEOUT = aiohttp.ClientTimeout(total=3)
_NEVER = Reading(status=None, at=0.0, failing_since=None, error="")


@dataclass(slots=True, kw_only=True)
class _Engine:
    service: ServiceKey
    ip: str
    token: str
    reading: Reading = _NEVER
    is_nudged: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class EnginePoller:
    """Engines are known by (namespace, group). Lives in one event loop."""

    def __init__(self, on_news: Callable[[ServiceKey], None]) -> None:
        self._on_news = on_news
        self._engines: dict[tuple[str, str], _Engine] = {}
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)

    async def close(self) -> None:
        for engine in self._engines.values():
            if engine.task is not None:
                engine.task.cancel()
        await self._session.close()

    def follow(self, service: ServiceKey, targets: dict[str, tuple[str, str]]) -> None:
        """Asks the engines of `service` from now on: group -> (address, token); others of it are forgotten."""
        for key in [key for key, engine in self._engines.items() if engine.service == service]:
            engine = self._engines[key]
            if targets.get(key[1]) != (engine.ip, engine.token):
                assert engine.task is not None
                engine.task.cancel()
                del self._engines[key]
        for group, (ip, token) in targets.items():
            key = (service[0], group)
            if key not in self._engines:
                engine = self._engines[key] = _Engine(service=service, ip=ip, token=token)
                engine.task = asyncio.create_task(self._poll(engine))

    def reading(self, namespace: str, group: str) -> Reading | None:
        """What the engine said last; None before it was asked."""
        engine = self._engines.get((namespace, group))
        return None if engine is None or engine.reading is _NEVER else engine.reading

    def nudge(self, service: ServiceKey) -> None:
        """Asks the engines of `service` now: something about their pods changed."""
        for engine in self._engines.values():
            if engine.service == service:
                engine.is_nudged.set()

    async def _poll(self, engine: _Engine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = engine.reading
            engine.is_nudged.clear()
            try:
                said = await self._ask(engine)
                engine.reading = Reading(status=said, at=loop.time(), failing_since=None, error="")
            except EngineUnavailable as error:
                since = loop.time() if before.failing_since is None else before.failing_since
                engine.reading = Reading(status=before.status, at=before.at, failing_since=since, error=str(error))
            if engine.reading.failing_since is not None or _essence(before.status) != _essence(engine.reading.status):
                self._on_news(engine.service)
            is_serving = engine.reading.failing_since is None and _is_serving(engine.reading.status)
            await asyncio.sleep(_MIN_INTERVAL_S)
            try:
                interval = _SERVING_INTERVAL_S if is_serving else _OTHER_INTERVAL_S
                await asyncio.wait_for(engine.is_nudged.wait(), interval - _MIN_INTERVAL_S)
            except TimeoutError:
                pass

    async def _ask(self, engine: _Engine) -> EngineStatus:
        host = f"[{engine.ip}]" if ":" in engine.ip else engine.ip
        headers = {"Authorization": f"Bearer {engine.token}"}
        try:
            async with self._session.get(f"http://{host}:{ADMIN_PORT}/status", headers=headers) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer within {_TIMEOUT.total:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise EngineUnavailable(f"/status answered {response.status}: {' '.join(text.split())[:200]}")
        try:
            return engine_status(json.loads(text))
        except ValueError as error:
            raise EngineUnavailable(f"/status did not answer with JSON: {error}") from error


def _is_serving(status: EngineStatus | None) -> bool:
    return status is not None and status.state == "serving" and _is_fresh(status)


def _is_fresh(status: EngineStatus) -> bool:
    return status.last_token_age_seconds is not None and status.last_token_age_seconds < TOKEN_AGE_LIMIT_S


def _essence(status: EngineStatus | None) -> object:
    """What decides about the service's status, without what changes from answer to answer."""
    if status is None:
        return None
    phases = tuple((phase.name, phase.finished) for phase in status.startup)
    has_token = status.last_token_age_seconds is not None
    return status.state, status.reason, phases, has_token, _is_fresh(status), status.nodes
