"""Polls /status of each engine at an interval, and reports answers that may change a service's status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import quote

from rayloom_operator.engines.gateway_status import gateway_status
from rayloom_operator.engines.progress import interval_s, start_progress
from rayloom_operator.engines.request import ask_either
from rayloom_operator.engines.status import MAX_RANKS, EngineStatus, absent_model, engine_status
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.names import ADMIN_PORT, ServiceKey
from rayloom_operator.observe.observed import Reading
from rayloom_operator.observe.verdict import STALLED, TOKEN_AGE_LIMIT_S
from rayloom_operator.texts import head

logger = logging.getLogger(__name__)

# If few engines serve, each is polled every second, so that the status shows a hang as soon as the engine notices it.
# With more engines the intervals grow, so that the operator keeps up. Even the longest interval is below `STALE_S`.
_MIN_SERVING_INTERVAL_S = 1.0
_USUAL_ANSWERS_PER_S = 50
_SERVING_INTERVAL_S = 5.0
_MAX_ANSWERS_PER_S = 600
_MAX_SERVING_INTERVAL_S = 15.0
_OTHER_INTERVAL_S = 1.0
# The limit matters if thousands of engines do not answer. Without it, requests to these engines, and reconciles of
# their services, would take all of the operator's time.
_MAX_RETRIES_PER_S = 200
# The shortest interval. Pods often change several times in a moment, and each change triggers a request.
_MIN_INTERVAL_S = 0.3
# The shortest interval between reports if only texts have changed. Each report causes a reconcile and a status write.
_WORDS_INTERVAL_S = 5.0
_MAX_ERROR = 600  # characters
_NOT_FOUND = 404
_NEVER = Reading(status=None, at=math.inf, failing_since=None, error="", advanced_at=0.0)


class _Essence(NamedTuple):
    """The part of an answer that the service's status depends on, without numbers that change in each answer."""

    state: object
    words: object  # text for people


class Target(NamedTuple):
    """The address of an engine, and the identity of its pod, because another pod may get the address later."""

    ip: str
    token: str  # token of the engine's admin port
    pod_uid: str
    num_starts: int = 0  # restarts of the engine's container: answers from before a restart do not count any more
    max_ranks: int = MAX_RANKS
    old_token: str = ""  # derived from the operator's previous key; empty if the key was never changed
    is_gateway: bool = False  # a gateway generates no tokens, and is never polled more often than an engine that serves
    model: str = ""  # name of a model at a gateway with several models: this model's status is polled
    has_models: bool = False  # a gateway with several models: its status describes the models file that it has read


@dataclass(slots=True, kw_only=True)
class _PolledEngine:
    service: ServiceKey
    target: Target
    reading: Reading = _NEVER
    reported: _Essence | None = None  # the essence of the answer that was reported last
    reported_at: float = -math.inf
    is_nudged: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)


class EnginePoller:
    """Polls the /status of each engine, and keeps the last answers.

    Not thread-safe: used in one event loop. `on_report` is called with the service of an engine whose answer, or
    missing answer, may change the service's status. `num_expected` returns how many more engines may be polled soon. A
    restarted operator finds the engines one by one. With `num_expected`, it polls the first engines at the interval
    that all engines together will need.
    """

    def __init__(self, on_report: Callable[[ServiceKey], None], num_expected: Callable[[], int] = lambda: 0) -> None:
        self._on_report = on_report
        self._num_expected = num_expected
        self._engines: dict[ServiceKey, dict[str, _PolledEngine]] = {}  # service -> name of an engine replica -> engine
        self.num_engines = 0
        self.num_failing = 0  # engines that did not answer the last request
        self.num_failures = 0  # unanswered requests since the start of this process

    async def close(self) -> None:
        for service in list(self._engines):
            self.follow(service, {})

    def follow(self, service: ServiceKey, targets: dict[str, Target]) -> None:
        """From now on, polls `targets` and no other engines of `service`. The keys are names of engine replicas."""
        engines = self._engines.pop(service, {})
        self.num_engines += len(targets) - len(engines)
        for name, engine in list(engines.items()):
            if targets.get(name) != engine.target:
                engine.task.cancel()
                self.num_failing -= _is_failing(engine.reading)
                del engines[name]
        for name, target in targets.items():
            if name not in engines:
                engine = engines[name] = _PolledEngine(service=service, target=target)
                engine.task = asyncio.create_task(self._poll(engine))
        if engines:
            self._engines[service] = engines

    def reading(self, service: ServiceKey, replica: str) -> Reading | None:
        """Returns the last answer of the engine; None before the first answer or failure."""
        engine = self._engines.get(service, {}).get(replica)
        return None if engine is None or engine.reading is _NEVER else engine.reading

    def silent(self, since: float) -> list[ServiceKey]:
        """Returns the services of engines that last answered before the loop time `since`, and whose last request did
        not fail."""
        engines = (each for engines in self._engines.values() for each in engines.values())
        return [each.service for each in engines if each.reading.at < since and not _is_failing(each.reading)]

    def interval_s(self) -> float:
        """Returns the seconds between requests to an engine that serves."""
        return serving_interval_s(self.num_engines)

    def retry_interval_s(self) -> float:
        """Returns the seconds between requests to an engine that does not answer, and between reconciles of its
        service."""
        return max(_OTHER_INTERVAL_S, self.num_failing / _MAX_RETRIES_PER_S)

    def note_drain(self, service: ServiceKey, replica: str, is_to_drain: bool) -> None:
        """Notes that a request to drain, or to accept requests again, was just sent to the engine.

        Earlier answers, and the answer to a poll that is under way, do not count any more.
        """
        engine = self._engines.get(service, {}).get(replica)
        if engine is None or engine.reading is _NEVER:
            return
        status = engine.reading.status
        if is_to_drain and status is not None and status.state == "serving":
            # The count of requests may be old, so at least one request is assumed.
            requests = status.requests.model_copy(update={"in_flight": max(status.requests.in_flight, 1)})
            status = status.model_copy(update={"state": "draining", "requests": requests})
            self._on_report(service)
        engine.reading = replace(engine.reading, status=status)
        engine.reported = _essence(status)
        engine.is_nudged.set()

    def nudge(self, service: ServiceKey) -> None:
        """Polls the engines of `service` now, because their pods changed or a PUT /adapters was sent to them."""
        for engine in self._engines.get(service, {}).values():
            engine.is_nudged.set()

    async def _poll(self, engine: _PolledEngine) -> None:
        """Polls one engine until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = engine.reading
            engine.is_nudged.clear()
            reading = await self._read(engine, before)
            if engine.reading is not before:
                # The answer is ignored: it may be from before the request to drain, or to accept requests again.
                continue
            engine.reading = reading
            self.num_failing += _is_failing(reading) - _is_failing(before)
            has_turned = _is_failing(reading) != _is_failing(before)
            has_other_start = before.start != reading.start
            if _note_essence(engine, loop.time()) or has_turned or has_other_start:
                self._on_report(engine.service)
            await asyncio.sleep(_MIN_INTERVAL_S)
            # `wait_for` is not used: in Python 3.11 it loses a cancellation that comes together with the nudge. When a
            # pod ends, the two come together.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s(engine, has_turned) - _MIN_INTERVAL_S):
                    await engine.is_nudged.wait()

    async def _read(self, engine: _PolledEngine, before: Reading) -> Reading:
        """Returns the reading after one more request. Raises nothing, so that polling continues after any answer."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            status = await self._ask(engine)
            at = loop.time()
            return Reading(
                status=status,
                at=at,
                failing_since=None,
                error="",
                advanced_at=at if _has_advanced(before.status, status) else before.advanced_at,
                start=start_progress(before.start, status.startup, at, interval_s(self.num_engines)),
            )
        except Exception as error:
            self.num_failures += 1
            if not isinstance(error, EngineUnavailable):
                logger.exception("%s/%s: a bug in the operator; asking the engine again", *engine.service)
            since = asked_at if before.failing_since is None else before.failing_since
            return replace(
                before,
                failing_since=since,
                error=head(str(error), _MAX_ERROR),
                advanced_at=since if before is _NEVER else before.advanced_at,
            )

    def _interval_s(self, engine: _PolledEngine, has_turned: bool) -> float:
        """Returns the seconds until the next request. After a first failure, the next request follows soon.

        `has_turned`: of the last two requests, exactly one failed.
        """
        reading = engine.reading
        if _is_failing(reading):
            return _OTHER_INTERVAL_S if has_turned else min(self.retry_interval_s(), _MAX_SERVING_INTERVAL_S)
        is_slow = _is_serving(reading.status) or engine.target.is_gateway
        return serving_interval_s(self.num_engines + self._num_expected()) if is_slow else _OTHER_INTERVAL_S

    async def _ask(self, engine: _PolledEngine) -> EngineStatus:
        target = engine.target
        path = f"/status?model={quote(target.model, safe='')}" if target.model else "/status"
        code, body = await ask_either(target.ip, ADMIN_PORT, (target.token, target.old_token), path=path)
        if target.model and code == _NOT_FOUND:
            return absent_model()
        if target.has_models:
            return gateway_status(code, body)
        status = engine_status(code, body, target.max_ranks)
        # The start-up phases would take most of the memory of 10,000 answers, and are of no use once an engine serves.
        return status.model_copy(update={"startup": (), "model": None}) if status.state == "serving" else status


def serving_interval_s(num_engines: int) -> float:
    """Returns the seconds between requests to an engine that serves: 1 s with few engines, 5 s with 250 engines, 15 s
    with 9000."""
    usual = min(max(num_engines / _USUAL_ANSWERS_PER_S, _MIN_SERVING_INTERVAL_S), _SERVING_INTERVAL_S)
    return max(usual, min(num_engines / _MAX_ANSWERS_PER_S, _MAX_SERVING_INTERVAL_S))


def _is_failing(reading: Reading) -> bool:
    return reading.failing_since is not None


def _is_serving(status: EngineStatus | None) -> bool:
    return status is not None and status.state == "serving" and status.has_token_within(TOKEN_AGE_LIMIT_S)


def _has_advanced(before: EngineStatus | None, status: EngineStatus) -> bool:
    """Returns whether the engine serves, or its start has made progress. More time in the same phase is no progress."""
    return _is_serving(status) or _start_of(status) != _start_of(before)


def _start_of(status: EngineStatus | None) -> object:
    if status is None:
        return None
    return status.state, [(phase.name, phase.done, phase.finished) for phase in status.startup]


def _note_essence(engine: _PolledEngine, now: float) -> bool:
    """Returns whether the last answer must be reported, and marks it as reported if so."""
    essence, before = _essence(engine.reading.status), engine.reported
    if essence == before:
        return False
    is_text_alone = before is not None and essence is not None and essence.state == before.state
    if is_text_alone and now - engine.reported_at < _WORDS_INTERVAL_S:
        return False
    engine.reported = essence
    engine.reported_at = now
    return True


def _essence(status: EngineStatus | None) -> _Essence | None:
    if status is None:
        return None
    state = (
        status.state,
        tuple((phase.name, phase.finished) for phase in status.startup),
        status.last_token_age_seconds is not None,
        status.has_token_within(TOKEN_AGE_LIMIT_S),
        # The rollout waits until a draining engine has no requests.
        status.state == "draining" and status.requests.unfinished == 0,
        status.is_held,  # the scaler adds an engine at once if a service has none
        STALLED.search(status.reason) is not None,
        len(status.ranks),
        status.adapters,
        status.gateway,
    )
    # The reason of an engine without progress contains seconds that change with each answer, so they are removed.
    reason = re.sub(r"\d+ s\b", "", status.reason)
    return _Essence(state=state, words=(reason, status.nodes))
