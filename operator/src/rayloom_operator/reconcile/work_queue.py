"""The order in which services are reconciled. A key is in the queue once, and is reconciled by one task at a time.

Events of engines and pods, and requeues that are due soon, go first; then changed specs and regular resyncs; then new
services. So thousands of services that are created at once keep no failed engine of another service waiting, and a
service that was begun is finished before the next one begins.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from rayloom_operator.decide.requeue import REGULAR_S
from rayloom_operator.names import ServiceKey

_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 10.0
_MAX_DOUBLINGS = 10
# An event of a service whose reconcile failed waits this long after the failure: the event rarely cures the failure,
# but an engine that fails in the meantime must not wait for the whole back-off.
_EVENT_AFTER_FAILURE_S = 2.0
# One of so many reconciles is for a known service, and one is for a new service, so that no priority starves. A new
# service brings about six reconciles of the first priority, so with a greater share of new services those would pile
# up.
_KNOWN_EACH = 8
_NEW_EACH = 64
PRIORITIES = ("news", "known", "new")  # as the label of the metric has them
_EVENT, _KNOWN, _NEW = range(len(PRIORITIES))
# Below half a millisecond uvloop's call_later returns a handle without a time.
_SHORTEST_S = 0.001

Reconcile = Callable[[ServiceKey], Awaitable[float | None]]


class WorkQueue:
    """Lives in one event loop. Ignores keys until it is opened."""

    def __init__(
        self,
        limit: Callable[[], int] = lambda: 1,
        *,
        is_open: bool = True,
        on_wait: Callable[[str, float], object] = lambda priority, seconds: None,
    ) -> None:
        """`limit` returns how many keys may be reconciled at once. `on_wait` gets one of PRIORITIES, and the seconds
        from the time when a key was added with that priority until its reconcile."""
        self._limit = limit
        self._on_wait = on_wait
        self._is_open = is_open
        # By priority: keys that wait, and the loop time at which each was added, in that order.
        self._ready: list[OrderedDict[ServiceKey, float]] = [OrderedDict() for _ in PRIORITIES]
        self._num_started = 0
        self._working: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()  # added while they were reconciled
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}
        self._num_failures: dict[ServiceKey, int] = {}
        self._failed_at: dict[ServiceKey, float] = {}  # loop time, of keys whose last reconcile failed
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """The number of keys that wait for a reconcile that is due."""
        return sum(map(len, self._ready))

    def open(self) -> None:
        """Accepts keys from now on."""
        self._is_open = True

    async def drain(self) -> None:
        """Starts no more reconciles, and returns once none runs."""
        self._is_closed = True
        self._changed.set()
        while self._working:
            self._changed.clear()
            await self._changed.wait()

    def add(self, key: ServiceKey, *, is_changed: bool = False, is_new: bool = False) -> None:
        """Queues the key for a reconcile; once, however often it is added before that reconcile.

        After a failed reconcile the next one begins 2 s later at the earliest, unless the service `is_changed` or
        `is_new`.
        """
        if is_changed or is_new:
            self._num_failures.pop(key, None)
        self._put(key, _NEW if is_new else _KNOWN if is_changed else _EVENT)

    def _put(self, key: ServiceKey, priority: int) -> None:
        if not self._is_open:
            return
        if key in self._working:
            self._again.add(key)
        elif any(key in ready for ready in self._ready[: priority + 1]):
            return
        elif key in self._num_failures and key in self._timers:
            since = asyncio.get_running_loop().time() - self._failed_at[key]
            self.add_after(key, max(_EVENT_AFTER_FAILURE_S - since, 0.0))
        else:
            for ready in self._ready:
                ready.pop(key, None)
            self._ready[priority][key] = asyncio.get_running_loop().time()
            self._changed.set()

    def add_after(self, key: ServiceKey, seconds: float) -> None:
        """Requeues the key after so many seconds, or earlier where an earlier requeue was asked for."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        priority = _EVENT if seconds < REGULAR_S else _KNOWN
        self._timers[key] = loop.call_later(max(seconds, _SHORTEST_S), self._ring, key, priority)

    async def work(self, reconcile: Reconcile) -> None:
        """Calls `reconcile` for each key, for at most `limit` keys at a time, until the queue is drained.

        `reconcile` returns the seconds until the key is requeued, or None for no requeue. When it raises, the key is
        requeued after a delay that doubles with each failure in a row; `reconcile` logs the exception itself.
        """
        async with asyncio.TaskGroup() as tasks:
            while not self._is_closed:
                while self.depth and len(self._working) < self._limit():
                    key = self._next()
                    self._working.add(key)
                    tasks.create_task(self._reconcile(key, reconcile))
                self._changed.clear()
                await self._changed.wait()

    def _next(self) -> ServiceKey:
        self._num_started += 1
        if self._num_started % _NEW_EACH == 0:
            priority = _NEW
        elif self._num_started % _KNOWN_EACH == 0:
            priority = _KNOWN
        else:
            priority = _EVENT
        if not self._ready[priority]:
            priority = next(each for each, ready in enumerate(self._ready) if ready)
        key, since = self._ready[priority].popitem(last=False)
        self._on_wait(PRIORITIES[priority], asyncio.get_running_loop().time() - since)
        return key

    async def _reconcile(self, key: ServiceKey, reconcile: Reconcile) -> None:
        timer = self._timers.get(key)
        try:
            delay = await reconcile(key)
            # A reconcile that succeeded knows when the next is due, and replaces the timers of those before it.
            if timer is not None and self._timers.get(key) is timer:
                timer.cancel()
                del self._timers[key]
            self._num_failures.pop(key, None)
            self._failed_at.pop(key, None)
        except Exception:  # noqa: BLE001 - a failed reconcile of one service must not stop the others
            num_failures = self._num_failures.get(key, 0)
            self._failed_at[key] = asyncio.get_running_loop().time()
            self._num_failures[key] = num_failures + 1
            delay = min(_FIRST_RETRY_S * 2 ** min(num_failures, _MAX_DOUBLINGS), _MAX_RETRY_S)
        finally:
            self._working.discard(key)
            self._changed.set()
        if delay is not None:
            self.add_after(key, delay)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _ring(self, key: ServiceKey, priority: int) -> None:
        del self._timers[key]
        self._put(key, priority)
