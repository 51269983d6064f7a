"""A proxy between one operator and the API server: a log of requests, a gate, and a hook after each write."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from simulated_nodes.api_client import Document, cluster_of, tls

_WRITES = ("POST", "PUT", "PATCH", "DELETE")
# The first "resourceVersion" in an object is the object's own version.
_VERSION = re.compile(rb'"resourceVersion": ?"(\d+)"')
# The first "labels" in an object are the object's own labels. All values in this map are strings, so the map ends at
# the first closing brace.
_LABELS = re.compile(rb'"labels": ?(\{[^{}]*\})')
_KEPT_S = 60.0  # time for which an idle connection is kept
_HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "accept-encoding"}


class Request(NamedTuple):
    at: float  # arrival time by time.monotonic()
    method: str
    path: str
    code: int  # status of the answer; 0 before the answer
    version: str = ""  # resourceVersion after a write; empty if the answer has none
    labels: str = ""  # labels of the object after a write, as JSON

    @property
    def is_write(self) -> bool:
        """True when the request changes the cluster. A renewal of the leader's lease does not count."""
        return self.method in _WRITES and "/leases" not in self.path

    @property
    def is_waiting(self) -> bool:
        """True if the API server has not answered yet. A watch has no answer."""
        return self.code == 0 and "watch=true" not in self.path


class Connections:
    """TLS connections to the API server. The proxies of all operators share them, because a handshake is expensive."""

    def __init__(self, kubeconfig: Path) -> None:
        cluster = cluster_of(kubeconfig)
        self.server: str = cluster["server"]
        self.authority: str = cluster["certificate-authority-data"]
        # The context has no client certificate, so the API server authenticates each operator by its own token.
        context = tls(kubeconfig, with_client=False)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self.session.close()


class Proxy:
    """A proxy from HTTP on loopback to the API server's TLS, in one event loop. Any thread may read `log`."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._is_closed = False
        self.log: list[Request] = []
        # Called with each write when the API server has answered and before the operator receives the answer.
        self.after_write: Callable[[Request], None] | None = None
        self.is_open = asyncio.Event()  # requests wait while this event is cleared
        self.port = 0
        # The server forgets a handler whose client has disconnected. So the proxy records all handlers, and `close`
        # ends them.
        self._handlers: set[asyncio.Task[object]] = set()
        # The timeout is short, because watches end only by cancellation.
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.1)

    @classmethod
    async def start(cls, connections: Connections) -> Proxy:
        proxy = cls(connections)
        await proxy._runner.setup()
        await web.TCPSite(proxy._runner, "127.0.0.1", 0).start()
        proxy.port = proxy._runner.addresses[0][1]
        return proxy

    @property
    def cluster(self) -> Document:
        """The cluster entry of the operator's kubeconfig.

        The entry has a CA, although plain HTTP uses none. Without a CA in the entry, the operator would load all CAs of
        this machine three times. This takes 70 ms of CPU time.
        """
        return {"server": f"http://127.0.0.1:{self.port}", "certificate-authority-data": self._connections.authority}

    async def close(self) -> None:
        self._is_closed = True
        self.is_open.set()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._runner.cleanup()

    def requests(self, part: str = "", since: float = 0.0) -> list[Request]:
        """Requests with `part` in their path that arrived after `since`, a time by time.monotonic()."""
        return [each for each in list(self.log) if part in each.path and each.at >= since]

    def writes(self, part: str = "", since: float = 0.0) -> list[Request]:
        return [each for each in self.requests(part, since) if each.is_write]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            return await self._pass(request)
        finally:
            self._handlers.discard(handler)

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        await self.is_open.wait()
        if self._is_closed:
            return web.Response(status=503)
        body = await request.read()
        at = time.monotonic()
        index = len(self.log)
        self.log.append(Request(at, request.method, request.path_qs, 0))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
        headers["Accept-Encoding"] = "identity"  # without this header, long answers are compressed
        async with self._connections.session.request(
            request.method, self._connections.server + request.path_qs, data=body or None, headers=headers
        ) as upstream:
            answer = web.StreamResponse(status=upstream.status)
            answer.content_type = upstream.content_type
            if "watch=true" in request.query_string:
                with contextlib.suppress(ConnectionError):
                    await answer.prepare(request)
                    async for chunk in upstream.content.iter_any():
                        await answer.write(chunk)
                return answer
            content = await upstream.read()
            is_write = self.log[index].is_write
            written = content if is_write else b""
            self.log[index] = self.log[index]._replace(
                code=upstream.status, version=_first(_VERSION, written), labels=_first(_LABELS, written)
            )
            if self.after_write is not None and is_write:
                self.after_write(self.log[index])
            return web.Response(status=upstream.status, body=content, content_type=upstream.content_type)


def _first(pattern: re.Pattern[bytes], content: bytes) -> str:
    found = pattern.search(content)
    return "" if found is None else found[1].decode()
