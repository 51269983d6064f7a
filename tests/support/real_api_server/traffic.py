"""Simulated clients and kube-proxy: requests at a steady rate to the pods in a service's EndpointSlices.

The operator sets labels on pods, and by these labels the real controllers choose the pods for the EndpointSlices. As
for real clients, a request to an engine that has ended or drains is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from simulated_nodes.api_client import Api, Document
from simulated_nodes.engines import Engines

SLICE_LABEL = "kubernetes.io/service-name"  # label of EndpointSlices


class Traffic:
    """Requests that one event loop sends. Any thread may read the results."""

    def __init__(self, api: Api, engines: Engines, namespace: str, service: str, *, per_s: float, seconds: float):
        """`per_s` is the number of requests in a second, `seconds` the duration of each."""
        self._api = api
        self._engines = engines
        self._where = namespace, service
        self._pause_s = 1 / per_s
        self._seconds = seconds
        self._slices: dict[str, list[str]] = {}  # name -> ready addresses
        self._follower: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self.num_sent = 0
        self.failures: list[str] = []
        self.addresses: tuple[str, ...] = ()  # addresses that a request may reach
        self.fewest: int | None = None  # the smallest length of `addresses` since the first request

    def start(self) -> None:
        self._follower = asyncio.create_task(self._follow())
        self._begin(self._send())

    async def close(self) -> None:
        """Stops sending. Returns when every request has ended."""
        self._is_over = True
        while self._tasks:
            await asyncio.gather(*self._tasks)
        if self._follower is not None:
            self._follower.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self) -> None:
        namespace, service = self._where
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        async for kind, found in self._api.follow(path, labelSelector=f"{SLICE_LABEL}={service}"):
            name = found["metadata"]["name"]
            self._slices.pop(name, None)
            if kind != "DELETED":
                self._slices[name] = ready_addresses(found)
            self.addresses = tuple(sorted({each for ready in self._slices.values() for each in ready}))
            if self.fewest is not None:
                self.fewest = min(self.fewest, len(self.addresses))

    async def _send(self) -> None:
        while not self._is_over:
            if self.addresses or self.num_sent:
                if self.fewest is None:
                    self.fewest = len(self.addresses)
                self.num_sent += 1
                self._begin(self._request(self.num_sent))
            await asyncio.sleep(self._pause_s)

    async def _request(self, number: int) -> None:
        if not self.addresses:
            self.failures.append("there is no endpoint")
            return
        ip = self.addresses[number % len(self.addresses)]
        engine = self._engines.by_ip.get(ip)
        if engine is None or not engine.takes_requests:
            self.failures.append(f"{ip} refused: {'it is gone' if engine is None else engine.said_state}")
            return
        engine.num_running += 1
        try:
            await asyncio.sleep(engine.first_token_s)
            if not engine.is_failing:
                engine.first_tokens.append(engine.first_token_s)
            await asyncio.sleep(max(0.0, self._seconds - engine.first_token_s))
        finally:
            engine.num_running -= 1
        if self._engines.by_ip.get(ip) is not engine:
            self.failures.append(f"{ip} cut a stream")
            return
        engine.num_finished += 1
        if engine.is_failing:
            engine.num_failed += 1
            self.failures.append(f"{ip} answered with an error")


def ready_addresses(endpoint_slice: Document) -> list[str]:
    """Addresses of an EndpointSlice that kube-proxy would use."""
    endpoints = endpoint_slice.get("endpoints") or ()
    return [address for each in endpoints if each["conditions"].get("ready") for address in each["addresses"]]
