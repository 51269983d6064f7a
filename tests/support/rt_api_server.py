"""A FakeKube behind HTTP: the parts of an API server that the operator's process and kopf need. It runs in a thread."""

import asyncio
import json
import threading
from contextlib import contextmanager

import yaml
from aiohttp import web

from rayloom_operator.kube.client import KubeError
from rt_fake_kube import FakeKube

_KINDS = {
    "/api/v1": {"namespaces": "Namespace", "pods": "Pod"},
    "/apis/apiextensions.k8s.io/v1": {"customresourcedefinitions": "CustomResourceDefinition"},
    "/apis/batch/v1": {"jobs": "Job"},
    "/apis/discovery.k8s.io/v1": {"endpointslices": "EndpointSlice"},
    "/apis/ray.io/v1": {"rayclusters": "RayCluster"},
    "/apis/rayloom.dev/v1alpha1": {"llmservices": "LLMService"},
}


def _discovery(path):
    """Returns the API server's discovery document at `path`, or None if the path has no such document."""
    groups = [each.removeprefix("/apis/").split("/") for each in _KINDS if each.startswith("/apis/")]
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in groups]
        found = [
            {"name": each[0], "versions": [said], "preferredVersion": said}
            for each, said in zip(groups, versions, strict=True)
        ]
        return {"kind": "APIGroupList", "groups": found}
    if path in _KINDS:
        verbs = ["get", "list", "watch", "create", "patch", "delete"]
        resources = [
            {
                "name": name,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind != "Namespace",
                "verbs": verbs,
            }
            for name, kind in _KINDS[path].items()
        ]
        return {"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2], "resources": resources}
    return None


class ApiServer:
    def __init__(self):
        self.kube = FakeKube()
        self.loop = None
        self.address = ""

    def put(self, manifest):
        """Stores an object. May be called from any thread; the server's thread sends the event to the watches."""
        asyncio.run_coroutine_threadsafe(self._put(manifest), self.loop).result(60)

    async def _put(self, manifest):
        self.kube.put(manifest)

    async def answer(self, request):
        try:
            return await self._answer(request)
        except KubeError as error:
            return web.json_response({"kind": "Status", "message": str(error), "code": error.code}, status=error.code)

    async def _answer(self, request):
        path, said = request.path, _discovery(request.path)
        if said is not None:
            return web.json_response(said)
        if request.method == "GET":
            if path.split("/")[-1] not in {"leases", *(name for names in _KINDS.values() for name in names)}:
                return web.json_response(await self.kube.get(path))
            if request.query.get("watch"):
                return await self._watch(request)
            items, version = await self.kube.list(path, {})
            return web.json_response({"kind": "List", "items": items, "metadata": {"resourceVersion": version}})
        body = json.loads(await request.read())
        if request.method == "POST":
            return web.json_response(body, status=201 if await self.kube.create(body) else 409)
        if request.method == "DELETE":
            await self.kube.delete(path)
            return web.json_response({})
        if request.content_type == "application/apply-patch+yaml":
            return web.json_response(await self.kube.apply(body))
        if request.content_type == "application/json-patch+json":
            return web.json_response(await self._replace_status(path.removesuffix("/status"), *body))
        return web.json_response(await self.kube.patch(path, body))

    async def _replace_status(self, path, *steps):
        same_uid, new_status = steps
        assert [(each["op"], each["path"]) for each in steps] == [("test", "/metadata/uid"), ("add", "/status")]
        known = await self.kube.get(path)
        if known["metadata"]["uid"] != same_uid["value"]:
            raise KubeError(422, "the server rejected our request due to an error in our request")
        return await self.kube.replace_status(known | {"status": new_status["value"]})

    async def _watch(self, request):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async for kind, found in self.kube.watch(request.path, {}, request.query.get("resourceVersion", "")):
            await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
        return response


@contextmanager
def serving(folder):
    """An ApiServer that answers during the block. `folder/kubeconfig` has its address."""
    server, is_up, is_over = ApiServer(), threading.Event(), asyncio.Event()

    async def run():
        server.loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        is_up.set()
        await is_over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert is_up.wait(60)
        config = {
            "clusters": [{"name": "c", "cluster": {"server": server.address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        yield server
    finally:
        server.loop.call_soon_threadsafe(is_over.set)
        thread.join(60)
