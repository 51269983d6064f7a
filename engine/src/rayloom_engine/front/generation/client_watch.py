"""Ends a generation as soon as its client closes the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rayloom_engine.front.generation.generation import Generation


def watch_client(receive: Callable[[], Awaitable[Any]], generation: Generation) -> asyncio.Task[None]:
    """Returns a task that ends `generation` when its client closes the connection.

    Read the request's body before the call. Cancel the task when the answer is complete.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.client_gone()

    return asyncio.create_task(watch())
