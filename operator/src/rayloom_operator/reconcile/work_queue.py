"""Decides the order in which services are reconciled.

A service's key is in the queue at most once, and one task at a time reconciles it. The priorities are:

1. events of engines and pods, and short requeues (below the regular interval);
2. changed specs and regular requeues;
3. new services.

So a failed engine does not wait behind thousands of new services. Most steps for a service that is being created also
come before the first reconcile of the next new service.
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
# After a failed reconcile, an event of the service starts another reconcile, but not before this many seconds after the
# failure. The event rarely cures the failure. But an engine that fails meanwhile must not wait for the whole back-off.
_EVENT_AFTER_FAILURE_S = 2.0
# Every 8th reconcile takes a waiting key of the second priority, and every 64th reconcile takes a waiting key of the
# third priority. So no priority starves. New services get no larger share, because each new service causes about six
# reconciles of the first priority, and those reconciles would pile up.
_KNOWN_EACH = 8
_NEW_EACH = 64
PRIORITIES = ("news", "known", "new")  # values of the metric's label, from the first priority to the third
_EVENT, _KNOWN, _NEW = range(len(PRIORITIES))
# Below half a millisecond, uvloop's call_later returns a handle without `when()`, which `add_after` needs.
_SHORTEST_S = 0.001

Reconcile = Callable[[ServiceKey], Awaitable[float | None]]


class WorkQueue:
    """The queue of the keys of services that are due. Until `open` is called, keys are ignored.

    Not thread-safe: used in one event loop.
    """

    def __init__(
        self,
        limit: int = 1,
        *,
        is_open: bool = True,
        on_wait: Callable[[str, float], object] = lambda priority, seconds: None,
    ) -> None:
        """Up to `limit` keys are reconciled at once.

        `on_wait` is called when a key leaves the queue: with one of PRIORITIES, and the seconds that the key waited.
        """
        self._limit = limit
        self._on_wait = on_wait
        self._is_open = is_open
        # For each priority: waiting key -> loop time at which it was added, the oldest first.
        self._ready: list[OrderedDict[ServiceKey, float]] = [OrderedDict() for _ in PRIORITIES]
        self._num_started = 0
        self._working: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()  # keys that were added during their reconcile
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}
        # Keys for which `add_after` kept a pending timer during their reconcile. The timer stays after the reconcile,
        # because the reconcile may have read its input before the event for which `add_after` was called.
        self._relied_on: set[ServiceKey] = set()
        self._num_failures: dict[ServiceKey, int] = {}
        self._failed_at: dict[ServiceKey, float] = {}  # loop time of the failure, for keys whose last reconcile failed
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """The number of keys whose reconcile is due and has not begun."""
        return sum(map(len, self._ready))

    def open(self) -> None:
        """Accepts keys from now on."""
        self._is_open = True

    async def drain(self) -> None:
        """Starts no more reconciles, and returns when the running reconciles have ended."""
        self._is_closed = True
        self._changed.set()
        while self._working:
            self._changed.clear()
            await self._changed.wait()

    def add(self, key: ServiceKey, *, is_changed: bool = False, is_new: bool = False) -> None:
        """Queues the key for a reconcile. A key that is in the queue already is not added twice.

        If the last reconcile of the key failed, the next reconcile begins at the earliest 2 s after the failure. A
        service that `is_changed` or `is_new` does not wait for these 2 s.
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
        """Requeues the key after `seconds`. If the key has a requeue that is due earlier, that requeue stays.

        If the key is being reconciled, the requeue comes after that reconcile.
        """
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                if key in self._working:
                    self._relied_on.add(key)
                return
            timer.cancel()
        priority = _EVENT if seconds < REGULAR_S else _KNOWN
        self._timers[key] = loop.call_later(max(seconds, _SHORTEST_S), self._ring, key, priority)

    async def work(self, reconcile: Reconcile) -> None:
        """Calls `reconcile` with each queued key, up to `limit` of them at a time, until the queue is drained.

        `reconcile` returns the seconds until the key is requeued, or None for no requeue. When `reconcile` raises, the
        key is requeued after a delay that doubles with each failure in a row. `reconcile` logs the exception itself.
        """
        async with asyncio.TaskGroup() as tasks:
            while not self._is_closed:
                while self.depth and len(self._working) < self._limit:
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
            # After a success, an older requeue is cancelled. The delay that this reconcile returned still counts, and
            # so do requeues that were added during the reconcile.
            if timer is not None and self._timers.get(key) is timer and key not in self._relied_on:
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
            self._relied_on.discard(key)
            self._changed.set()
        if delay is not None:
            self.add_after(key, delay)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _ring(self, key: ServiceKey, priority: int) -> None:
        del self._timers[key]
        self._put(key, priority)
