"""Mailbox: collects the core's outputs for one HTTP request, until the request's handler takes all of them."""

from __future__ import annotations

import asyncio

from rayloom_engine.protocol.messages import SequenceOutput


class Mailbox:
    """Outputs of a request's sequences ("lanes"), in order of arrival. For one event loop and one reader."""

    def __init__(self) -> None:
        self._items: list[tuple[int, SequenceOutput]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failure(self) -> Exception | None:
        """The error that ended the request. It is set at once, even if earlier outputs are still to be taken."""
        return self._failure

    def put(self, lane: int, output: SequenceOutput) -> None:
        self._items.append((lane, output))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the request: the reader gets all earlier outputs, then `error`. Only the first call has an effect."""
        if self._failure is None:
            self._failure = error
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, SequenceOutput]]:
        """Returns all (lane, output) pairs since the last call. Waits for the first one; returns an empty list after
        `timeout_s`.

        Raises the request's failure once all earlier outputs are taken.
        """
        if not self._items and self._failure is None:
            # A bare future and a timer, because this runs for every token and asyncio.wait_for costs several times as
            # much.
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        items, self._items = self._items, []
        if not items and self._failure is not None:
            raise self._failure
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
