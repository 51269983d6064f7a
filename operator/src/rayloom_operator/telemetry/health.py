"""The operator's HTTP port with /healthz, /readyz and /metrics.

The event loop that reconciles also serves this port, so that /healthz stops answering if that loop hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from aiohttp import web

from rayloom_operator.errors import OperatorError
from rayloom_operator.telemetry.metrics import Metrics


@contextlib.asynccontextmanager
async def serving(port: int, probes: Mapping[str, Callable[[], str]], metrics: Metrics) -> AsyncIterator[None]:
    """Serves the port inside the context. Each of `probes` (path -> function) returns a problem as text, or "".

    Raises OperatorError if the port is in use.
    """
    app = web.Application()
    for path, probe in probes.items():
        app.router.add_get(path, _answer(probe))

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app.router.add_get("/metrics", show)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, port=port).start()
        except OSError as error:
            raise OperatorError(f"cannot listen on port {port}: {error}; choose another with --health-port") from error
        yield
    finally:
        await runner.cleanup()


def _answer(probe: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        problem = probe()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return answer
