"""Asks engines for their /status, each at its own pace, and tells when an answer matters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rayloom_operator.engines.progress import interval_s, start_progress
from rayloom_operator.engines.request import ask_either
from rayloom_operator.engines.status import MAX_RANKS, EngineStatus, engine_status
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.names import ADMIN_PORT, ServiceKey
from rayloom_operator.observe.observed import Reading
from rayloom_operator.observe.verdict import STALLED, TOKEN_AGE_LIMIT_S
from rayloom_operator.texts import head

logger = logging.getLogger(__name__)

# A few engines that serve are asked each second, so that a hang is in the status as soon as the engine has found it.
# Many are asked more slowly, so that the operator keeps up. Any longer, and answers would be stale.
_MIN_SERVING_INTERVAL_S = 1.0
_USUAL_ANSWERS_PER_S = 50
_SERVING_INTERVAL_S = 5.0
_MAX_ANSWERS_PER_S = 600
_MAX_SERVING_INTERVAL_S = 15.0
_OTHER_INTERVAL_S = 1.0
# Where thousands are silent at once, neither questions nor looks at their services are to take all the time.
_MAX_LOOKS_PER_S = 200
# Of the interval: pods change several times in a moment, and each change asks.
_MIN_INTERVAL_S = 0.3
# Of an engine that says the same in other words: each of its answers would be a pass and a write of the status.
_WORDS_INTERVAL_S = 5.0
_MAX_ERROR = 600  # characters
_NEVER = Reading(status=None, at=math.inf, failing_since=None, error="", advanced_at=0.0)


class _Essence(NamedTuple):
    """What decides about the service's status, without what changes from answer to answer."""

    state: object
    words: object  # that people read: of them alone a change is news now and then


class Target(NamedTuple):
    """Where an engine is, and which: addresses are used again."""

    ip: str
    token: str
    pod_uid: str
    num_starts: int = 0  # of its container: what an ended engine said is no word of the next one
    max_ranks: int = MAX_RANKS  # that it can have
    old_token: str = ""  # of one that was made before the operator's key was changed


@dataclass(slots=True, kw_only=True)
class _Engine:
    service: ServiceKey
    target: Target
    reading: Reading = _NEVER
    told: _Essence | None = None  # of the reading that was news last
    told_at: float = -math.inf
    is_nudged: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] = field(init=False)


class EnginePoller:
    """Lives in one event loop. `num_expected` says how many engines may come soon.

    An operator that was restarted finds them one by one, and asks the first no more often than when it has all.
    """

    def __init__(self, on_news: Callable[[ServiceKey], None], num_expected: Callable[[], int] = lambda: 0) -> None:
        self._on_news = on_news
        self._num_expected = num_expected
        self._engines: dict[ServiceKey, dict[str, _Engine]] = {}  # by group
        self.num_engines = 0
        self.num_failing = 0  # engines that did not answer last
        self.num_failures = 0  # answers that failed to come

    async def close(self) -> None:
        for service in list(self._engines):
            self.follow(service, {})

    def follow(self, service: ServiceKey, targets: dict[str, Target]) -> None:
        """Asks the engines of `service` from now on, by group; others of it are forgotten."""
        engines = self._engines.pop(service, {})
        self.num_engines += len(targets) - len(engines)
        for group, engine in list(engines.items()):
            if targets.get(group) != engine.target:
                engine.task.cancel()
                self.num_failing -= _is_failing(engine.reading)
                del engines[group]
        for group, target in targets.items():
            if group not in engines:
                engine = engines[group] = _Engine(service=service, target=target)
                engine.task = asyncio.create_task(self._poll(engine))
        if engines:
            self._engines[service] = engines

    def reading(self, service: ServiceKey, group: str) -> Reading | None:
        """What the engine said last; None before it was asked."""
        engine = self._engines.get(service, {}).get(group)
        return None if engine is None or engine.reading is _NEVER else engine.reading

    def silent(self, since: float) -> list[ServiceKey]:
        """The service of each engine whose last answer came before the loop time `since`, and no failure after it."""
        engines = (each for engines in self._engines.values() for each in engines.values())
        return [each.service for each in engines if each.reading.at < since and not _is_failing(each.reading)]

    def look_s(self) -> float:
        """After how many seconds to look again at a service with an engine that does not answer."""
        return max(_OTHER_INTERVAL_S, self.num_failing / _MAX_LOOKS_PER_S)

    def told(self, service: ServiceKey, group: str, is_to_drain: bool) -> None:
        """The engine was just told to drain or to go on: what it said before, or is about to say, counts no more."""
        engine = self._engines.get(service, {}).get(group)
        if engine is None or engine.reading is _NEVER:
            return
        said = engine.reading.status
        if is_to_drain and said is not None and said.state == "serving":
            # Nobody has counted its requests since.
            requests = said.requests.model_copy(update={"in_flight": max(said.requests.in_flight, 1)})
            said = said.model_copy(update={"state": "draining", "requests": requests})
            self._on_news(service)
        engine.reading = replace(engine.reading, status=said)
        engine.told = _essence(said)
        engine.is_nudged.set()

    def nudge(self, service: ServiceKey) -> None:
        """Asks the engines of `service` now: something about their pods changed."""
        for engine in self._engines.get(service, {}).values():
            engine.is_nudged.set()

    async def _poll(self, engine: _Engine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = engine.reading
            engine.is_nudged.clear()
            asked_at = loop.time()
            try:
                said, at = await self._ask(engine), loop.time()
                advanced = at if _has_advanced(before.status, said) else before.advanced_at
                start = start_progress(before.start, said.startup, at, interval_s(self.num_engines))
                reading = Reading(status=said, at=at, failing_since=None, error="", advanced_at=advanced, start=start)
            except Exception as error:
                # Whatever an engine answers, it is asked again.
                self.num_failures += 1
                if not isinstance(error, EngineUnavailable):
                    logger.exception("%s/%s: this is a mistake in the operator; asking again", *engine.service)
                since = asked_at if before.failing_since is None else before.failing_since
                advanced = since if before is _NEVER else before.advanced_at
                words = head(str(error), _MAX_ERROR)
                reading = replace(before, failing_since=since, error=words, advanced_at=advanced)
            if engine.reading is not before:
                continue  # the question was put before the engine was told something
            engine.reading = reading
            self.num_failing += _is_failing(reading) - _is_failing(before)
            has_turned = _is_failing(reading) != _is_failing(before)
            is_further = before.start != reading.start
            if _note_essence(engine, loop.time()) or has_turned or is_further:
                self._on_news(engine.service)
            await asyncio.sleep(_MIN_INTERVAL_S)
            # No `wait_for`: in Python 3.11 it drops a cancellation that comes with the nudge, as with the end of a pod.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s(reading, has_turned) - _MIN_INTERVAL_S):
                    await engine.is_nudged.wait()

    def _interval_s(self, reading: Reading, has_turned: bool) -> float:
        """After an answer or its absence. After the first absence the next question tells a hiccup from more."""
        if _is_failing(reading):
            return _OTHER_INTERVAL_S if has_turned else min(self.look_s(), _MAX_SERVING_INTERVAL_S)
        is_slow = _is_serving(reading.status)
        return serving_interval_s(self.num_engines + self._num_expected()) if is_slow else _OTHER_INTERVAL_S

    async def _ask(self, engine: _Engine) -> EngineStatus:
        target = engine.target
        code, body = await ask_either(target.ip, ADMIN_PORT, (target.token, target.old_token))
        said = engine_status(code, body, target.max_ranks)
        # How it started is most of what 10,000 engines that serve say, and nobody reads it any more.
        return said.model_copy(update={"startup": (), "model": None}) if said.state == "serving" else said


def serving_interval_s(num_engines: int) -> float:
    """How long after an answer an engine that serves is asked again: 1 s, 5 s from 250 engines, 15 s from 9000."""
    usual = min(max(num_engines / _USUAL_ANSWERS_PER_S, _MIN_SERVING_INTERVAL_S), _SERVING_INTERVAL_S)
    return max(usual, min(num_engines / _MAX_ANSWERS_PER_S, _MAX_SERVING_INTERVAL_S))


def _is_failing(reading: Reading) -> bool:
    return reading.failing_since is not None


def _is_serving(said: EngineStatus | None) -> bool:
    return said is not None and said.state == "serving" and said.has_token_within(TOKEN_AGE_LIMIT_S)


def _has_advanced(before: EngineStatus | None, said: EngineStatus) -> bool:
    """Whether the engine serves, or gets on with its start; phases count their own seconds, which are no progress."""
    done = [each and (each.state, [(p.name, p.done, p.finished) for p in each.startup]) for each in (said, before)]
    return _is_serving(said) or done[0] != done[1]


def _note_essence(engine: _Engine, now: float) -> bool:
    """Whether the last answer must be reported; marks it as reported."""
    essence, before = _essence(engine.reading.status), engine.told
    if essence == before:
        return False
    is_other_words = before is not None and essence is not None and essence.state == before.state
    if is_other_words and now - engine.told_at < _WORDS_INTERVAL_S:
        return False
    engine.told, engine.told_at = essence, now
    return True


def _essence(status: EngineStatus | None) -> _Essence | None:
    if status is None:
        return None
    phases = tuple((phase.name, phase.finished) for phase in status.startup)
    tokens = status.last_token_age_seconds is not None, status.has_token_within(TOKEN_AGE_LIMIT_S)
    # An engine that stands still says for how many seconds.
    reason = re.sub(r"\d+ s\b", "", status.reason)
    # Whoever waits for the end of a drain is told of it.
    is_drained = status.state == "draining" and status.requests.in_flight == 0
    is_stalled = STALLED.search(status.reason) is not None
    return _Essence((status.state, phases, tokens, is_drained, is_stalled, len(status.ranks)), (reason, status.nodes))
