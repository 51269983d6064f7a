"""Mailbox: collects the core's outputs for one HTTP request, until the request's handler takes all of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from rayloom_engine.protocol.messages import SequenceOutput

Items = list[tuple[int, SequenceOutput]]
# Parts of answers that are made but not written yet: the mailbox of the request, the function that writes, the bytes
Outbox = list[tuple["Mailbox", Callable[[bytes], None], bytes]]
Reader = Callable[[Items, Outbox, float], bool]  # the last argument is the present time, as of time.monotonic

_AT_ONCE = 16  # mailboxes that one callback reads, in about 0.3 ms


class Mailbox:
    """Outputs of a request's sequences ("lanes"), in order of arrival. For one event loop and one reader."""

    # `__slots__` stores the attributes of an instance in adjacent memory, which causes fewer cache misses than a dict.
    # All classes whose methods are called for each token use `__slots__`.
    __slots__ = ("_failure", "_idle_since_s", "_is_reader_due", "_items", "_reader", "_waiter")

    def __init__(self) -> None:
        self._items: Items = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Reader | None = None  # the function that gets new items; None unless `take` waits
        self._is_reader_due = False  # `put` has returned True, and `read` was not called since
        self._idle_since_s = 0.0  # time.monotonic at which the reader last took items or `take` began to wait

    @property
    def failure(self) -> Exception | None:
        """The error that ended the request. It is set at once, even before earlier outputs are taken."""
        return self._failure

    def put(self, lane: int, output: SequenceOutput) -> bool:
        """Adds an output, unless the request has failed. Returns True if the caller must call `read` soon.

        Further calls return False until `read` is called.
        """
        if self._failure is not None:
            return False  # a failed `read` may have dropped outputs, so this output could follow a gap
        self._items.append((lane, output))
        if self._reader is None:
            self.wake()
            return False
        if self._is_reader_due:
            return False
        self._is_reader_due = True
        return True

    def fail(self, error: Exception) -> None:
        """Ends the request: the reader gets all earlier outputs, then `error`. Only the first call has an effect."""
        if self._failure is None:
            self._failure = error
        self.wake()

    def wake(self) -> None:
        """Ends the wait of `take`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float, reader: Reader | None = None) -> Items:
        """Returns all (lane, output) pairs since the last call.

        Waits for the first pair; returns an empty list if none arrives for `timeout_s`. During the wait, `read` calls
        `reader` with the pairs that arrive. If `reader` returns True, it has processed the pairs, and the wait begins
        again. The waiting task is then not woken, because a wake-up costs more than all other work for a token.
        `reader` must not store the list. Raises the request's failure once all earlier outputs are taken. An exception
        of `reader` becomes the request's failure, and the pairs in that call of `reader` are dropped.
        """
        if not self._items and self._failure is None:
            # This code runs for every token. asyncio.wait_for takes several times the CPU time of a future and a timer.
            self._waiter = asyncio.get_running_loop().create_future()
            self._reader = reader
            self._idle_since_s = time.monotonic()
            timer = _IdleTimer(self, timeout_s)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
                self._reader = None
        items, self._items = self._items, []
        if not items and self._failure is not None:
            raise self._failure
        return items

    def idle_s(self, now_s: float) -> float:
        """Returns how long `take` has waited without an output. 0 if `read` is due. `now_s`: time.monotonic."""
        return 0.0 if self._is_reader_due else now_s - self._idle_since_s

    def read(self, outbox: Outbox, now_s: float) -> None:
        """Gives new items to the reader, which adds parts of the answer to `outbox`.

        Gives none if `take` does not wait, or has returned the items. `now_s`: time.monotonic.
        """
        self._is_reader_due = False
        if self._reader is None or not self._items:
            return
        try:
            is_taken = self._failure is None and self._reader(self._items, outbox, now_s)
        except Exception as error:  # noqa: BLE001 - `take` raises it
            # The reader may have sent some of these outputs, so `take` must not return them once more.
            self._items.clear()
            self.fail(error)
            return
        if is_taken:
            self._items.clear()
            self._idle_since_s = now_s
        else:
            self.wake()


class _IdleTimer:
    """Ends a wait in which nothing arrives. Outputs do not reset the timer; if it fires too early, it is set again."""

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(timeout_s, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        left_s = self._timeout_s - self._mailbox.idle_s(time.monotonic())
        if left_s > 0.0:
            self._handle = self._loop.call_later(left_s, self._fire)
        else:
            self._mailbox.wake()


class DueReaders:
    """Reads the mailboxes that have new outputs, a few of them in each callback, and writes what the readers make.

    Between two callbacks, the event loop reads the data that clients and engines have sent. So a new request does not
    wait until the tokens of a step are written to all streams.

    A callback first encodes the events of all of its streams, then writes them to the sockets. Encoding and writing
    each stream in turn takes more CPU time, for two reasons: Python's code and the kernel's code evict each other from
    the CPU caches, and a client that has read one event sleeps and must be woken for the next event.
    """

    def __init__(self) -> None:
        self._mailboxes: deque[Mailbox] = deque()

    def add(self, first: Sequence[Mailbox], others: Sequence[Mailbox]) -> None:
        """Schedules the mailboxes for reading: `first` before all scheduled mailboxes, `others` after them."""
        if not self._mailboxes and (first or others):
            asyncio.get_running_loop().call_soon(self._read)
        self._mailboxes.extendleft(reversed(first))
        self._mailboxes += others

    def _read(self) -> None:
        outbox: Outbox = []
        now_s = time.monotonic()
        for _ in range(min(_AT_ONCE, len(self._mailboxes))):
            self._mailboxes.popleft().read(outbox, now_s)
        for mailbox, write, part in outbox:
            try:
                write(part)
            except Exception as error:  # noqa: BLE001 - `take` raises it
                mailbox.fail(error)
        if self._mailboxes:
            asyncio.get_running_loop().call_soon(self._read)
