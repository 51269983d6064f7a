"""Which services to look at next. A key is in the queue once, and has one turn at a time.

News of engines and pods, and turns that are due soon, go first; then changed specs and regular looks; then services
that were never seen. So thousands that are made at once keep no failed engine of another one waiting, and those that
were begun are finished first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

from rayloom_operator.decide.requeue import REGULAR_S
from rayloom_operator.names import ServiceKey

_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 10.0
_MAX_DOUBLINGS = 10
# News of a key that fails is no reason to hurry, but engines that fail meanwhile are not to wait for long.
_NEWS_AFTER_FAILURE_S = 2.0
# So that nobody waits for ever: of so many turns one is a known service's, and a new one's. A new one brings about six
# turns with news, so with a greater share of those news would not end.
_KNOWN_EACH, _NEW_EACH = 8, 64
PRIORITIES = ("news", "known", "new")
_NEWS, _KNOWN, _NEW = range(len(PRIORITIES))
# Below half a millisecond uvloop gives a handle that knows no time.
_SHORTEST_S = 0.001


class WorkQueue:
    """Lives in one event loop. Until it is opened it takes nothing."""

    def __init__(
        self,
        limit: Callable[[], int] = lambda: 1,
        *,
        is_open: bool = True,
        on_wait: Callable[[str, float], object] = lambda priority, seconds: None,
    ) -> None:
        """`limit` says how many keys may have their turn at a time. `on_wait` gets one of PRIORITIES, and the seconds
        from when a key was added with that until its turn."""
        self._limit, self._on_wait, self._is_open = limit, on_wait, is_open
        # By priority: loop times at which keys that wait for their turn were added, the first ones first.
        self._ready: list[OrderedDict[ServiceKey, float]] = [OrderedDict() for _ in PRIORITIES]
        self._num_turns = 0
        self._working: set[ServiceKey] = set()
        self._again: set[ServiceKey] = set()  # came during their turn
        self._timers: dict[ServiceKey, asyncio.TimerHandle] = {}
        self._num_failures: dict[ServiceKey, int] = {}
        self._failed_at: dict[ServiceKey, float] = {}  # loop time, of keys whose last turn failed
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that wait for their turn now."""
        return sum(map(len, self._ready))

    def open(self, keys: Iterable[ServiceKey]) -> None:
        """Takes keys from now on. These are there already, and as patient as new ones."""
        self._is_open = True
        for key in keys:
            self._put(key, _NEW)

    async def drain(self) -> None:
        """Hands out no more keys, and returns when none has its turn."""
        self._is_closed = True
        self._changed.set()
        while self._working:
            self._changed.clear()
            await self._changed.wait()

    def add(self, key: ServiceKey, *, is_changed: bool = False, is_new: bool = False) -> None:
        """Has the key looked at soon; once, however often it is added before.

        After a failure that is at least 2 s later, unless what was asked for `is_changed`, or `is_new` here.
        """
        if is_changed or is_new:
            self._num_failures.pop(key, None)
        self._put(key, _NEW if is_new else _KNOWN if is_changed else _NEWS)

    def _put(self, key: ServiceKey, priority: int) -> None:
        if not self._is_open:
            return
        if key in self._working:
            self._again.add(key)
        elif any(key in ready for ready in self._ready[: priority + 1]):
            return
        elif key in self._num_failures and key in self._timers:
            since = asyncio.get_running_loop().time() - self._failed_at[key]
            self.add_after(key, max(_NEWS_AFTER_FAILURE_S - since, 0.0))
        else:
            for ready in self._ready:
                ready.pop(key, None)
            self._ready[priority][key] = asyncio.get_running_loop().time()
            self._changed.set()

    def add_after(self, key: ServiceKey, seconds: float) -> None:
        """Has the key looked at in so many seconds, or earlier when that was asked for."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        priority = _NEWS if seconds < REGULAR_S else _KNOWN
        self._timers[key] = loop.call_later(max(seconds, _SHORTEST_S), self._ring, key, priority)

    async def work(self, handle: Callable[[ServiceKey], Awaitable[float | None]]) -> None:
        """Calls `handle` with one key after the other, several at a time, until the queue drains.

        `handle` gives the seconds until the key's next turn, or None for no turn of its own. When it raises, its next
        turn comes after a delay that doubles with each failure in a row; the exception is `handle`'s to log.
        """
        async with asyncio.TaskGroup() as turns:
            while not self._is_closed:
                while self.depth and len(self._working) < self._limit():
                    key = self._next()
                    self._working.add(key)
                    turns.create_task(self._turn(key, handle))
                self._changed.clear()
                await self._changed.wait()

    def _next(self) -> ServiceKey:
        self._num_turns += 1
        priority = _NEW if self._num_turns % _NEW_EACH == 0 else _KNOWN if self._num_turns % _KNOWN_EACH == 0 else _NEWS
        if not self._ready[priority]:
            priority = next(each for each, ready in enumerate(self._ready) if ready)
        key, since = self._ready[priority].popitem(last=False)
        self._on_wait(PRIORITIES[priority], asyncio.get_running_loop().time() - since)
        return key

    async def _turn(self, key: ServiceKey, handle: Callable[[ServiceKey], Awaitable[float | None]]) -> None:
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
            self._changed.set()
        if delay is not None:
            self.add_after(key, delay)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _ring(self, key: ServiceKey, priority: int) -> None:
        del self._timers[key]
        self._put(key, priority)
