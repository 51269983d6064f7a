"""Turns: a lock that tenants get in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator


class Turns:
    """A lock that tenants get in turn. The tasks of one tenant get it in order of arrival. For one event loop.

    A tenant's first waiter waits only for the current holder and for at most one waiter of each other tenant, however
    many waiters the other tenants have.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._last_tenant = ""
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # tenant -> waiters; turns go in this order

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Holds the lock during the `with` block."""
        await self._wait(tenant)
        self._last_tenant = tenant
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        if not self._is_held:
            self._is_held = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._leave(tenant, waiter)
            else:  # the lock was already given to this waiter
                self._pass_on()
            raise

    def _leave(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant, deque())
        if waiter in line:
            line.remove(waiter)
        if not line:
            self._lines.pop(tenant, None)

    def _pass_on(self) -> None:
        while self._lines:
            tenant = next((name for name in self._lines if name != self._last_tenant), self._last_tenant)
            line = self._lines.pop(tenant)
            waiter = line.popleft()
            if line:
                self._lines[tenant] = line  # the tenant moves to the end of `_lines`
            if waiter.done():
                continue  # the waiter's task was cancelled, but has not run since
            waiter.set_result(None)
            return
        self._is_held = False
