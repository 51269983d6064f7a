"""A plain proxy on aiohttp and uvloop: passes a request's body on, and the parts of the answer as they arrive."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

_SESSION = web.AppKey("session", aiohttp.ClientSession)


def application(upstream: str) -> web.Application:
    """The proxy. `upstream`: the server's URL without a path."""

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read() or None
        async with request.app[_SESSION].request(request.method, upstream + request.path, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def session(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as opened:
            app[_SESSION] = opened
            yield

    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="URL of the server")
    arguments = parser.parse_args()
    web.run_app(
        application(arguments.upstream),
        host="127.0.0.1",
        port=arguments.port,
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
        handler_cancellation=True,
    )
