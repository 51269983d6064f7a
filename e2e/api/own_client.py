"""Runs a coroutine with the operator's own client of the test cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rayloom_operator.kube.client import Kube
from real_api_server.world import World


def with_kube(world: World, monkeypatch: pytest.MonkeyPatch, work: Callable[[Kube], Awaitable[None]]) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.kubeconfig))

    async def run() -> None:
        kube = Kube()
        try:
            await work(kube)
        finally:
            await kube.close()

    asyncio.run(run())
