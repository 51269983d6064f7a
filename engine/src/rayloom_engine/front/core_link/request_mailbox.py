"""Mailbox: where the core's outputs for one HTTP request wait until its handler takes them, all at once."""

from __future__ import annotations

import asyncio

from rayloom_engine.protocol.messages import Output


class Mailbox:
    """Outputs of a request's sequences ("lanes"), in order of arrival. For one event loop and one taker."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Output]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failure(self) -> Exception | None:
        """What ended the request, also while outputs from before it wait to be taken."""
        return self._failure

    def put(self, lane: int, output: Output) -> None:
        self._items.append((lane, output))
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the request with `error`, after what arrived before it. The first failure stays."""
        if self._failure is None:
            self._failure = error
        self._wake()

    async def take(self, timeout_s: float) -> list[tuple[int, Output]]:
        """Everything that arrived since the last call, waiting for the first; empty when `timeout_s` passed.

        Raises the failure once all outputs before it were taken.
        """
        if not self._items and self._failure is None:
            # A bare future and a timer: this runs for every token, and asyncio.wait_for costs several times as much.
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
