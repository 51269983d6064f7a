"""Which services to look at next. A key is in the queue once, and with one worker at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from rayloom_operator.names import ServiceKey

_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 10.0
_MAX_DOUBLINGS = 10
# News of a key that fails is no reason to hurry, but engines that fail meanwhile are not to wait for long.
_NEWS_AFTER_FAILURE_S = 2.0
_DRAIN_LOOK_S = 0.02
# Below half a millisecond uvloop gives a handle that knows no time.
_SHORTEST_S = 0.001


class WorkQueue:
    """Lives in one event loop. Until it is opened it takes nothing."""

    def __init__(self, *, is_open: bool = True) -> None:
        self._is_open = is_open
        self._ready: asyncio.Queue[ServiceKey] = asyncio.Queue()
        self._queued: set[ServiceKey] = set()
        self._working: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()  # came while a worker had them
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}
        self._num_failures: dict[ServiceKey, int] = {}
        self._failed_at: dict[ServiceKey, float] = {}  # loop time, of keys whose last turn failed
        self._is_closed = False

    @property
    def depth(self) -> int:
        """Keys that wait for a worker now."""
        return self._ready.qsize()

    def open(self, keys: Iterable[ServiceKey]) -> None:
        """Takes keys from now on, these first."""
        self._is_open = True
        for key in keys:
            self.add(key)

    async def drain(self) -> None:
        """Hands out no more keys, and returns when no worker has one."""
        self._is_closed = True
        while self._working:
            await asyncio.sleep(_DRAIN_LOOK_S)

    def add(self, key: ServiceKey, *, is_new: bool = False) -> None:
        """Has the key looked at soon; once, however often it is added before.

        After a failure that is at least 2 s later, unless `is_new` says that what was asked for has changed.
        """
        if not self._is_open:
            return
        if is_new:
            self._num_failures.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key in self._queued:
            return
        elif key in self._num_failures and key in self._timers:
            since = asyncio.get_running_loop().time() - self._failed_at[key]
            self.add_after(key, max(_NEWS_AFTER_FAILURE_S - since, 0.0))
        else:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: ServiceKey, seconds: float) -> None:
        """Has the key looked at in so many seconds, or earlier when that was asked for."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(max(seconds, _SHORTEST_S), self._ring, key)

    async def work(self, handle: Callable[[ServiceKey], Awaitable[float | None]]) -> None:
        """One worker: calls `handle` with one key after the other, for ever.

        `handle` gives the seconds until the key's next turn, or None for no turn of its own. When it raises, its next
        turn comes after a delay that doubles with each failure in a row; the exception is `handle`'s to log.
        """
        while True:
            key = await self._ready.get()
            if self._is_closed:
                return
            self._queued.discard(key)
            self._working.add(key)
            timer = self._timers.get(key)
            try:
                delay = await handle(key)
                # A turn that ended well knows when the next is due, whatever those before it said.
                if timer is not None and self._timers.get(key) is timer:
                    timer.cancel()
                    del self._timers[key]
                self._num_failures.pop(key, None)
                self._failed_at.pop(key, None)
            except Exception:  # noqa: BLE001 - one service's trouble is not another's
                num_failures = self._num_failures.get(key, 0)
                self._failed_at[key] = asyncio.get_running_loop().time()
                self._num_failures[key] = num_failures + 1
                delay = min(_FIRST_RETRY_S * 2 ** min(num_failures, _MAX_DOUBLINGS), _MAX_RETRY_S)
            finally:
                self._working.discard(key)
            if delay is not None:
                self.add_after(key, delay)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _ring(self, key: ServiceKey) -> None:
        del self._timers[key]
        self.add(key)
