"""The client and the proxy of tests on an API server, against a server that fails like an API server."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from operator_processes.proxy import Connections, Proxy
from rt_tls import Authority
from simulated_nodes.api_client import Api, ApiError

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(folder: Path, answer: Answer) -> AsyncIterator[Path]:
    """The kubeconfig of a server that answers each request by calling `answer`."""
    authority = Authority()
    issued = authority.issue("127.0.0.1", is_engine=True)
    (folder / "cert").write_bytes(issued.cert)
    (folder / "key").write_bytes(issued.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    runner = web.ServerRunner(web.Server(answer, access_log=None, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    data = {"certificate-authority": authority.cert, "client-certificate": issued.cert, "client-key": issued.key}
    encoded = {f"{name}-data": base64.b64encode(pem).decode() for name, pem in data.items()}
    cluster = encoded | {"server": f"https://127.0.0.1:{runner.addresses[0][1]}"}
    config = {"clusters": [{"cluster": cluster}], "users": [{"user": encoded}]}
    (folder / "kubeconfig").write_text(json.dumps(config))
    try:
        yield folder / "kubeconfig"
    finally:
        await runner.cleanup()


def with_api(folder: Path, answer: Answer, work: Callable[[Api], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(folder, answer) as kubeconfig:
            api = Api(kubeconfig)
            try:
                await work(api)
            finally:
                await api.close()

    asyncio.run(run())


def an_object(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1"}}


def test_objects_that_were_deleted_during_a_broken_watch_are_reported_before_the_new_list(tmp_path: Path) -> None:
    lists = [["a", "b"], ["b", "c"]]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "watch" in request.query:
            event = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
            return web.Response(text=f"{json.dumps(event)}\n")
        items = [an_object(name) for name in lists.pop(0)]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    async def work(api: Api) -> None:
        events = []
        async for kind, found in api.follow("/things"):
            events.append((kind, found["metadata"]["name"]))
            if len(events) == 5:
                break
        assert events == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("ADDED", "b"), ("ADDED", "c")]

    with_api(tmp_path, answer, work)


def test_a_request_that_is_refused_for_the_moment_is_repeated(tmp_path: Path) -> None:
    codes = [503, 429, 200]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"message": "apiserver is shutting down"}, status=codes.pop(0))

    async def work(api: Api) -> None:
        await api.request("POST", "/things", {})
        assert codes == []

    with_api(tmp_path, answer, work)


@pytest.mark.parametrize(
    ("code", "path", "text", "message"),
    [
        (429, "/pods/a/eviction", json.dumps({"message": "a budget"}), "a budget"),
        (404, "/things", "404 page not found\n", "404 page not found\n"),
    ],
)
def test_a_refused_eviction_and_an_unknown_kind_are_raised_at_once(
    tmp_path: Path, code: int, path: str, text: str, message: str
) -> None:
    num_requests = 0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal num_requests
        num_requests += 1
        return web.Response(text=text, status=code)

    async def work(api: Api) -> None:
        with pytest.raises(ApiError) as refused:
            await api.request("POST", path, {})
        assert (refused.value.code, str(refused.value), num_requests) == (code, message, 1)

    with_api(tmp_path, answer, work)


def test_a_closed_proxy_leaves_no_watch_of_a_client_that_was_killed(tmp_path: Path) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{}\n")
        return await asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with serving(tmp_path, answer) as kubeconfig:
            before = asyncio.all_tasks()
            connections = Connections(kubeconfig)
            proxy = await Proxy.start(connections)
            proxy.is_open.set()
            async with aiohttp.ClientSession() as session:
                watch = await session.get(f"http://127.0.0.1:{proxy.port}/things?watch=true")
                assert await watch.content.readline() == b"{}\n"
                watch.close()
            await proxy.close()
            async with asyncio.timeout(30):
                while asyncio.all_tasks() - before:
                    await asyncio.sleep(0.01)
            await connections.close()

    asyncio.run(run())
