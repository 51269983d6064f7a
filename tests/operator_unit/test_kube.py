"""The client against an HTTP server: what is counted, and that a process whose time is over changes nothing."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rayloom_operator import kube as module
from rayloom_operator.kube import Deposed, Kube, KubeError, KubeUnreachable

MANIFEST = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team", "name": "a"}}


class Server:
    """Takes what is sent in full, and answers with `code`."""

    def __init__(self):
        self.taken = []  # (method, body)
        self.code = 200
        self.num_items = 0
        self.may_write = True
        self.requests = []  # as the client counts them
        self.peers = set()  # ports of the client's connections

    def page(self, request):
        """Of `num_items` numbers, as many as are asked for."""
        first, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 1))
        after = min(first + limit, self.num_items)
        more = {"continue": str(after)} if after < self.num_items else {}
        return {"items": list(range(first, after)), "metadata": {"resourceVersion": "7"} | more}

    async def answer(self, request):
        body = await request.read()
        self.peers.add(request.transport.get_extra_info("peername")[1])
        self.taken.append((request.method, json.loads(body) if body else None))
        content = {"message": "no"} if self.code >= 400 else self.page(request)
        return web.json_response(content, status=self.code)


@asynccontextmanager
async def serving(monkeypatch):
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()

    class Info:
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"

        def as_ssl_context(self):
            return True

        def as_http_headers(self):
            return {}

    monkeypatch.setattr(module, "login", lambda: Info())
    kube = Kube(lambda: server.may_write, lambda verb, code: server.requests.append((verb, code)))
    try:
        yield server, kube
    finally:
        await kube.close()
        await runner.cleanup()


WRITES = {
    "apply": lambda kube: kube.apply(MANIFEST),
    "patch": lambda kube: kube.patch("/x", {}),
    "create": lambda kube: kube.create(MANIFEST),
    "delete": lambda kube: kube.delete("/x", "uid-1"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_who_may_not_write_sends_nothing_but_reads(write, monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            await write(kube)
            assert len(server.taken) == 1
            server.may_write = False
            with pytest.raises(Deposed):
                await write(kube)
            await kube.list("/x", {})
            assert [method for method, _ in server.taken][1:] == ["GET"]

    asyncio.run(run())


def test_who_was_stopped_while_a_connection_was_made_sends_nothing(monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            connect = kube._session.connector.connect

            async def slowly(*arguments, **named):
                made = await connect(*arguments, **named)
                server.may_write = False
                return made

            monkeypatch.setattr(kube._session.connector, "connect", slowly)
            with pytest.raises(Deposed):
                await kube.delete("/x", "uid-1")
            assert server.taken == []

    asyncio.run(run())


def test_requests_are_counted_by_verb_and_code(monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            await kube.list("/x", {})
            await kube.get("/x")
            await kube.create(MANIFEST)
            server.code = 403
            with pytest.raises(KubeError, match="no"):
                await kube.apply(MANIFEST)
            monkeypatch.setattr(kube._info, "server", "http://127.0.0.1:1", raising=False)
            with pytest.raises(KubeUnreachable):
                await kube.delete("/x")
            assert server.requests == [
                ("list", "200"),
                ("get", "200"),
                ("create", "200"),
                ("patch", "403"),
                ("delete", "none"),
            ]

    asyncio.run(run())


def test_a_login_that_fails_keeps_the_credentials_that_there_are(monkeypatch, caplog):
    async def run():
        async with serving(monkeypatch) as (_, kube):

            def login():
                raise OSError("half written")

            before = kube._info
            monkeypatch.setattr(module, "login", login)
            kube._logged_in_at = float("-inf")
            await kube.get("/x")
            assert kube._info is before
            assert "half written" in caplog.text

    asyncio.run(run())


def test_many_requests_at_once_share_a_few_connections(monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            await asyncio.gather(*(kube.get("/x") for _ in range(100)))
            assert len(server.taken) == 100
            assert len(server.peers) <= 16

    asyncio.run(run())


def test_a_long_list_comes_in_pages(monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            server.num_items = 600
            sizes = [len(items) async for items, _ in kube.pages("/x", {"labelSelector": "a"})]
            assert sizes == [250, 250, 100]
            assert await kube.list("/x", {}) == (list(range(600)), "7")

    asyncio.run(run())
