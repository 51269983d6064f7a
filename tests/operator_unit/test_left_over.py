"""Pods, objects and services that came and went leave nothing in the operator's tables.

Each test compares the sizes of all tables of a running controller before and after many events. Tests on a real API
server and the soak (`make soak`) measure the memory of the whole process, with kopf and the HTTP client.
"""

import pytest

from rayloom_operator.names import path_of
from rt_llmgateway import make_gateway_document, with_gateways
from rt_operator import make_pod_document
from rt_tables import table_sizes
from rt_world import SERVICE, service, with_world

NUM_PODS = 500
# Tables with an entry for each service, which are empty without a service.
OF_SERVICES = {
    "Deployments._found",
    "Drift._ours",
    "Drift._written",
    "EnginePoller._engines",
    "ObjectApplier._applied",
    "Observer._new_pods",
    "RestingNames._gone_at",
    "SharedObjects._digests",
    "WorkQueue._timers",
    "WritePace._paces",
}


def pod(number, labels, owner):
    """A pod without an address, so that no engine is polled."""
    document = make_pod_document(f"pod-{number}", is_head=False, node=f"node-{number}", ip="", owner=owner)
    document["metadata"]["labels"] = labels
    return {"apiVersion": "v1", "kind": "Pod", **document}


async def come_and_go(world, labels, owner, num_pods=NUM_PODS):
    """Creates and deletes this number of pods, ten at a time."""
    for first in range(0, num_pods, 10):
        pods = [pod(number, labels, owner) for number in range(first, first + 10)]
        for each in pods:
            world.kube.put(each)
        await world.rest()
        for each in pods:
            world.kube.remove(path_of(each))
        await world.rest()


@pytest.mark.parametrize("kind", ["worker", "gateway"])
def test_pods_that_came_and_went_leave_nothing(kind):
    async def story(world):
        world.ask_for(service(gateway={}))
        await world.until(lambda: world.kube.named("RayCluster") and world.kube.named("Deployment"))
        await world.rest()
        cluster = world.kube.objects[world.kube.path("RayCluster")]["metadata"]
        labels = {"rayloom.dev/service": "chat"}
        labels |= {"rayloom.dev/gateway": "chat"} if kind == "gateway" else {"rayloom.dev/group": cluster["name"]}
        await come_and_go(world, labels, cluster["uid"], 10)
        before = table_sizes(world.controller)
        await come_and_go(world, labels, cluster["uid"])
        assert table_sizes(world.controller) == before

    with_world(story)


def test_pods_of_an_llmgateway_that_came_and_went_leave_nothing():
    async def story(world):
        await world.until(lambda: world.kube.named("Deployment"))
        await world.rest()
        await come_and_go(world, {"rayloom.dev/llmgateway": "public"}, "uid-public", 10)
        before = table_sizes(world.controller)
        await come_and_go(world, {"rayloom.dev/llmgateway": "public"}, "uid-public")
        assert table_sizes(world.controller) == before

    with_gateways(story, prepare=lambda world: world.kube.put(make_gateway_document()))


def test_objects_that_were_deleted_and_created_again_leave_nothing():
    async def story(world):
        world.ask_for(service(gateway={}))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        before = table_sizes(world.controller)
        for name in ("chat", "chat-engines", "chat-gateway") * 10:
            path = f"/api/v1/namespaces/team/services/{name}"
            world.kube.remove(path)
            await world.until(lambda path=path: path in world.kube.objects)
            await world.rest()
        assert table_sizes(world.controller) == before

    with_world(story)


def test_a_deleted_service_leaves_nothing(monkeypatch):
    # Names of deleted RayClusters stay reserved for this many seconds.
    monkeypatch.setattr("rayloom_operator.observe.resting_names._REST_S", 0.01)

    async def story(world):
        sizes = []
        for number in range(20):
            world.ask_for(service(f"uid-{number}", gateway={}))
            await world.until(lambda: world.kube.named("RayCluster"))
            await world.rest()
            alive = table_sizes(world.controller)
            collect(world, SERVICE)
            await world.until(lambda: not world.controller._queue._timers)
            await world.rest()
            sizes.append(table_sizes(world.controller))
        assert sizes[-1] == sizes[0]
        assert alive.keys() >= OF_SERVICES - {"EnginePoller._engines"}, "these are its tables; it has no pod to poll"
        assert sizes[0].keys() & OF_SERVICES == set()

    with_world(story)


def test_a_deleted_llmgateway_leaves_nothing():
    async def story(world):
        sizes = []
        for number in range(20):
            document = make_gateway_document(f"gateway-{number}")
            document["metadata"] |= {"namespace": f"team-{number}", "uid": f"uid-{number}"}
            world.kube.put(document)
            await world.until(lambda: world.kube.named("Deployment"))
            await world.rest()
            collect(world, path_of(document))
            await world.rest()
            sizes.append(table_sizes(world.controller))
        assert sizes[-1] == sizes[0]

    with_gateways(story)


def collect(world, path):
    """Deletes an object and everything that it owns, like a client and the garbage collector."""
    owner = world.kube.objects[path]
    world.kube.remove(path)
    if owner["kind"] == "LLMService":
        world.controller.set_service(owner, True)
    for other, each in list(world.kube.objects.items()):
        owners = [one["uid"] for one in each["metadata"].get("ownerReferences", ())]
        if owner["metadata"]["uid"] in owners:
            world.kube.remove(other)
