"""The base of the simulated controllers: a watch, and a bounded number of writes at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine

from simulated_nodes.api_client import Api

_NUM_AT_ONCE = 16


class SimulatedController(ABC):
    """Runs `_follow` in one event loop. Subclasses implement `_follow` and start their writes by `_begin`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._slots = asyncio.Semaphore(_NUM_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._begin(self._follow())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    @abstractmethod
    async def _follow(self) -> None:
        """Watches objects and begins the writes for each change, until the task is cancelled."""

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
