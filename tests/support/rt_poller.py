"""A poller of one engine on loopback."""

import asyncio
import contextlib

from aiohttp import web

from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.poller import EnginePoller, Target

KEY = ("team", "chat")
GOOD = {
    "version": "v1",
    "state": "serving",
    "reason": "",
    "startup": [],
    "model": None,
    "last_token_age_seconds": 1.0,
    "ranks": [{"node": "n1", "rank": 0}],
}


@contextlib.asynccontextmanager
async def polled(monkeypatch, answer, num_expected=0):
    """Yields a poller of one engine, and the list of its events. `answer(request)` returns the engine's answers."""
    monkeypatch.setattr(engine_poller, "_OTHER_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_poller, "_MIN_SERVING_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_poller, "_MIN_INTERVAL_S", 0.01)
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(engine_poller, "ADMIN_PORT", runner.addresses[0][1])
    news = []
    poller = EnginePoller(news.append, lambda: num_expected)
    poller.follow(KEY, {"chat-0": Target("127.0.0.1", "secret", "uid-1")})
    try:
        yield poller, news
    finally:
        await poller.close()
        await runner.cleanup()


class Counted:
    """An engine whose n-th answer is `say(n)`."""

    def __init__(self, say=lambda _: GOOD):
        self.num = 0
        self._say = say

    async def answer(self, request):
        self.num += 1
        return web.json_response(self._say(self.num))


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
