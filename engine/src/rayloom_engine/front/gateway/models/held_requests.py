"""HeldRequests: the requests that wait until a model has a tokenizer, or until an engine reports a LoRA adapter."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from starlette.requests import Request

from rayloom_engine.core.planning.waiting_queue import has_room
from rayloom_engine.errors import QueueFull
from rayloom_engine.front.http.errors import ClientGone
from rayloom_engine.front.operations.lifecycle import Lifecycle


class HeldRequests:
    """The waiting requests of one model. The gateway may be ready before this model is. For one event loop."""

    def __init__(self, lifecycle: Lifecycle, hold_s: float, most: int, is_awaited: Callable[[str], bool]) -> None:
        """A request waits at most `hold_s`. At most `most` requests wait.

        `is_awaited` returns True for the name of a LoRA adapter that no engine has reported yet, but that the next
        engine may report.
        """
        self._lifecycle = lifecycle
        self._hold_s = hold_s
        self._most = most
        self._is_awaited = is_awaited
        self._nums: Counter[str] = Counter()  # tenant -> number of its requests that wait, at least 1

    def __len__(self) -> int:
        return self._nums.total()

    async def wait(self, request: Request, tenant: str, adapter: str | None = None) -> float | None:
        """Waits until the model has a tokenizer and, if `adapter` is declared, an engine has reported its adapters.

        Returns time.monotonic at which the wait began; None if the request did not have to wait.

        `adapter`: the LoRA adapter in the request. Read the request's body before the call. Raises QueueFull if too
        many requests wait, and ClientGone when the client closes the connection. Returns early if `lifecycle` begins
        to refuse requests, and after `hold_s` at the latest. Then the handler refuses the request.
        """

        def is_awaited() -> bool:
            return adapter is not None and self._is_awaited(adapter)

        if self._lifecycle.was_ready and not is_awaited():
            return None
        self._check_room(tenant)
        since_s = time.monotonic()
        self._nums[tenant] += 1
        ready = asyncio.create_task(self._lifecycle.wait_ready(self._hold_s, is_awaited))
        gone = asyncio.create_task(_disconnect(request))
        try:
            await asyncio.wait((ready, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                gone.result()
                raise ClientGone
            ready.result()
            return since_s
        finally:
            ready.cancel()
            gone.cancel()
            self._nums[tenant] -= 1
            if not self._nums[tenant]:
                del self._nums[tenant]

    def _check_room(self, tenant: str) -> None:
        """Raises QueueFull if no request of `tenant` may wait. The limit for one API key is as in the core's queue."""
        num_held = len(self)
        if num_held >= self._most:
            raise QueueFull(
                f"the queue is full: {num_held} requests wait for an engine of the model; try again soon", 1
            )
        num_own = self._nums[tenant]
        if tenant and not has_room(num_own, num_held, 0, self._most):
            raise QueueFull(
                f"{num_own} requests of this API key wait for an engine of the model, and the queue's other places are "
                "kept for other keys; try again soon",
                1,
            )


async def _disconnect(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
