"""A running controller, whose cluster is a dictionary."""

import asyncio
import contextlib

from queue_steps import is_at_rest
from rayloom_operator.reconcile.controller import Controller
from rt_fake_kube import FakeKube
from rt_operator import SETTINGS, make_pod_document
from rt_shapes import SMOLLM2, stored

SERVICE = "/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices/chat"
CLIENT_SERVICE = "/api/v1/namespaces/team/services/chat"


def service(uid="uid-1", **spec):
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat", "namespace": "team", "uid": uid, "generation": 1},
        "spec": {"model": {"source": "builtin://smollm2-135m"}, **spec},
    }


def generation(number):
    """Metadata of the same service with this generation."""
    return {"metadata": service()["metadata"] | {"generation": number}}


def known(source):
    """The status of a service whose model has been inspected."""
    return {"status": {"model": stored(SMOLLM2, source)}}


class World:
    """A running controller, and its cluster."""

    def __init__(self, kube, leads, settings):
        self.kube, self.leads = kube, leads
        self.controller = Controller(self.kube, settings, leads=leads)

    def ask_for(self, document):
        self.controller.set_service(self.kube.put(document), False)

    def reason(self, kind="Available"):
        if not self.kube.statuses:
            return None
        return next(each["reason"] for each in self.kube.statuses[-1]["conditions"] if each["type"] == kind)

    def message(self, kind="Accepted"):
        return next(each["message"] for each in self.kube.statuses[-1]["conditions"] if each["type"] == kind)

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def rest(self):
        """Returns when no work is left, except for work that a timer or an event will start."""
        queue = self.controller._queue
        for _ in range(5):
            await self.until(lambda: is_at_rest(queue))
            await asyncio.sleep(0.002)


def with_world(story, *, prepare=lambda kube: None, leads=None, kube=None, settings=None):
    """Runs `story` with a cluster that `prepare` has changed. `leads`: the controller leads once this event is set."""

    async def run():
        world = World(kube or FakeKube(), leads, settings or SETTINGS)
        prepare(world.kube)
        work = asyncio.create_task(world.controller.run())
        waits = leads is not None and not leads.is_set()
        await (world.controller.watches.is_synced if waits else world.controller.is_ready).wait()
        try:
            await story(world)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    asyncio.run(run())


def head(kube, state="ContainerCreating"):
    cluster = kube.objects[kube.path("RayCluster")]["metadata"]
    document = make_pod_document(engine={"ready": False, "state": {"waiting": {"reason": state}}})
    document["metadata"] |= {"namespace": "team", "ownerReferences": [{"uid": cluster["uid"]}]}
    document["metadata"]["labels"] |= {"rayloom.dev/service": "chat", "rayloom.dev/group": cluster["name"]}
    document["status"]["podIP"] = ""
    return {"apiVersion": "v1", "kind": "Pod", **document}
