"""The client against an HTTP server: counts, errors, and no changes by a process that is no longer the leader."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rayloom_operator.kube import client as module
from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import Deposed, Kube, KubeError, KubeUnreachable, Recreated

MANIFEST = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team", "name": "a", "uid": "uid-1"}}


class Server:
    """A server that reads each request completely, and answers with `code`."""

    def __init__(self):
        self.taken = []  # (method, body)
        self.code = 200
        self.codes = []  # statuses of the next answers, before `code`
        self.message = "no"  # message of a refusal
        self.found = {}  # fields in addition to a page's
        self.num_items = 0
        self.may_write = True
        self.requests = []  # requests as the client counts them
        self.peers = set()  # ports of the client's connections

    def page(self, request):
        """A page of the `num_items` objects, with the size that the request asks for."""
        first, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 1))
        after = min(first + limit, self.num_items)
        more = {"continue": str(after)} if after < self.num_items else {}
        items = [{"metadata": {"name": str(number)}, "spec": {"x": "y"}} for number in range(first, after)]
        return {"items": items, "metadata": {"resourceVersion": "7"} | more}

    async def answer(self, request):
        body = await request.read()
        self.peers.add(request.transport.get_extra_info("peername")[1])
        self.taken.append((request.method, json.loads(body) if body else None))
        code = self.codes.pop(0) if self.codes else self.code
        content = {"message": self.message} if code >= 400 else self.page(request) | self.found
        return web.json_response(content, status=code)


@asynccontextmanager
async def serving(monkeypatch, server=None):
    server, app = server or Server(), web.Application()
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
    kube = Kube(lambda: server.may_write, lambda *request: server.requests.append(request))
    try:
        yield server, kube
    finally:
        await kube.close()
        await runner.cleanup()


WRITES = {
    "apply": lambda kube: kube.apply(MANIFEST),
    "replace_status": lambda kube: kube.replace_status(MANIFEST | {"status": {}}),
    "patch": lambda kube: kube.patch("/x", {}),
    "create": lambda kube: kube.create(MANIFEST),
    "delete": lambda kube: kube.delete("/x", "uid-1"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_process_that_may_not_write_sends_only_reads(write, monkeypatch):
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


def test_a_process_that_was_stopped_while_it_connected_sends_nothing(monkeypatch):
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


@pytest.mark.parametrize(
    ("codes", "uid", "raised", "methods"),
    [
        ([422, 200], "uid-2", Recreated, ["PATCH", "GET"]),
        ([422, 200], "uid-1", "422", ["PATCH", "GET"]),
        ([422, 404], "", "404", ["PATCH", "GET"]),
        ([404], "", "404", ["PATCH"]),
        ([409], "", "409", ["PATCH"]),
    ],
)
def test_a_refused_status_is_distinguished_from_a_recreated_object_by_its_uid(codes, uid, raised, methods, monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            server.codes, server.found = codes, MANIFEST | {"metadata": MANIFEST["metadata"] | {"uid": uid}}
            with pytest.raises((KubeError, Recreated)) as error:
                await kube.replace_status(MANIFEST | {"status": {}})
            assert raised in (type(error.value), str(getattr(error.value, "code", "")))
            assert [method for method, _ in server.taken] == methods

    asyncio.run(run())


@pytest.mark.parametrize(
    ("codes", "methods", "raised"),
    [
        ([200], ["PUT"], None),
        ([404, 201], ["PUT", "POST"], None),
        ([404, 409], ["PUT", "POST"], 409),
        ([403], ["PUT"], 403),
    ],
)
def test_a_replacement_succeeds_only_if_its_content_was_written(codes, methods, raised, monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            server.codes = codes
            found = None
            try:
                await kube.replace(MANIFEST)
            except KubeError as error:
                found = error.code
            assert found == raised
            assert [(method, body == MANIFEST) for method, body in server.taken] == [(each, True) for each in methods]

    asyncio.run(run())


def test_a_create_that_lost_a_race_for_a_quota_does_not_count_as_an_existing_object(monkeypatch):
    async def run():
        async with serving(monkeypatch) as (server, kube):
            server.code, server.message = 409, 'pods "a" already exists'
            assert not await kube.create(MANIFEST)
            server.message = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
            with pytest.raises(KubeError, match="resourcequotas"):
                await kube.create(MANIFEST)

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


def test_a_failed_login_keeps_the_current_credentials(monkeypatch, caplog):
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
            pages = [items async for items, _ in kube.pages("/x", {"labelSelector": "a"}, shapes.OwnedFields)]
            assert [len(items) for items in pages] == [250, 250, 100]
            everything, version = await kube.list("/x", {})
            assert [int(each["metadata"]["name"]) for each in everything] == list(range(600))
            assert version == "7"
            assert everything[-1] == pages[-1][-1] | {"spec": {"x": "y"}}, "only what is asked for is read"

    asyncio.run(run())


class Line:
    """A server that always answers with the bytes of `text`."""

    may_write = True

    def __init__(self, text):
        self.text = text
        self.requests = []

    async def answer(self, request):
        return web.Response(body=self.text)


PODS = {"items": [{"metadata": {"name": "a", "labels": "none"}}], "metadata": {"resourceVersion": "7"}}


@pytest.mark.parametrize("text", [b"<html>", b"", b"[]", b'{"items": null}', b"\xff", json.dumps(PODS).encode()])
def test_a_list_that_cannot_be_read_counts_as_no_answer(monkeypatch, text):
    async def run():
        async with serving(monkeypatch, Line(text)) as (_, kube):
            with pytest.raises(KubeUnreachable, match="cannot be read"):
                await kube.pages("/x", {}, shapes.PodFields).__anext__()

    asyncio.run(run())


@pytest.mark.parametrize("text", [b"<html>\n", b"7\n", b'{"type": "ADDED", "object": 7}\n'])
def test_an_event_that_cannot_be_read_ends_the_watch_with_an_error(monkeypatch, text):
    async def run():
        async with serving(monkeypatch, Line(text)) as (_, kube):
            with pytest.raises(KubeError, match="cannot be read") as refused:
                await kube.watch("/x", {}, "7", shapes.PodFields).__anext__()
            assert refused.value.code == 502

    asyncio.run(run())


def test_a_watch_yields_the_fields_of_the_shape_and_ends_with_the_servers_error(monkeypatch):
    pod = {"metadata": {"name": "a", "managedFields": []}, "spec": {"nodeName": "n", "containers": []}}
    gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
    events = [{"type": "ADDED", "object": pod}, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}]
    text = "".join(json.dumps(each) + "\n" for each in [*events, {"type": "ERROR", "object": gone}])

    async def run():
        async with serving(monkeypatch, Line(text.encode())) as (_, kube):
            told = []
            with pytest.raises(KubeError, match="too old") as refused:
                async for each in kube.watch("/x", {}, "7", shapes.PodFields):
                    told.append(each)
            assert refused.value.code == 410
            assert told == [
                ("ADDED", {"metadata": {"name": "a"}, "spec": {"nodeName": "n"}}),
                ("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
            ]

    asyncio.run(run())
