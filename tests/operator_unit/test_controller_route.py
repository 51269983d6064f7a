"""The route to gateways in the controller, whose cluster is a dictionary: created, changed, restored, removed."""

from rayloom_operator.kube.client import NOT_FOUND, KubeError
from rt_world import service, with_world

HTTP = {"httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}}
INGRESS = {"ingress": {"host": "llm.example.com", "annotations": {"cert-manager.io/issuer": "x"}}}
ENTRY = "/apis/networking.k8s.io/v1/namespaces/team/ingresses/chat-gateway"
ROUTE = "/apis/gateway.networking.k8s.io/v1/namespaces/team/httproutes/chat-gateway"


def ask(world, generation, route=None):
    """The service with this route after a change of its spec, with the last written status."""
    gateway = {"gateway": {"replicas": 1} | ({"route": route} if route else {})}
    document = service(**gateway) | ({"status": world.kube.statuses[-1]} if world.kube.statuses else {})
    document["metadata"]["generation"] = generation
    world.ask_for(document)


def route_of(world):
    return world.kube.statuses[-1].get("gateway", {}).get("route", {}) if world.kube.statuses else {}


def test_a_route_is_created_replaced_by_the_other_kind_and_removed():
    async def story(world):
        kube = world.kube
        ask(world, 1, HTTP)
        await world.until(lambda: ROUTE in kube.objects)
        await world.rest()
        ask(world, 2, INGRESS)
        await world.until(lambda: ENTRY in kube.objects and route_of(world).get("kind") == "Ingress")
        await world.rest()
        assert ROUTE in kube.objects, "no controller has accepted the Ingress yet"
        kube.put(kube.objects[ENTRY] | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}})
        await world.until(lambda: ROUTE not in kube.objects)
        await world.until(lambda: route_of(world)["reason"] == "Accepted")
        ask(world, 3)
        await world.until(lambda: ENTRY not in kube.objects)
        await world.until(lambda: not route_of(world))

    with_world(story)


def test_an_edited_or_deleted_route_is_as_before():
    async def story(world):
        kube = world.kube
        ask(world, 1, INGRESS)
        await world.until(lambda: ENTRY in kube.objects)
        await world.rest()
        before = kube.objects[ENTRY]
        kube.put(before | {"metadata": before["metadata"] | {"annotations": {"cert-manager.io/issuer": "other"}}})
        await world.until(lambda: kube.objects[ENTRY]["metadata"]["annotations"] == {"cert-manager.io/issuer": "x"})
        kube.put(kube.objects[ENTRY] | {"spec": {"rules": []}})
        await world.until(lambda: kube.objects[ENTRY]["spec"] == before["spec"])
        kube.remove(ENTRY)
        await world.until(lambda: ENTRY in kube.objects)

    with_world(story)


def test_another_owners_ingress_stays_and_the_engines_are_made_nevertheless():
    theirs = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {"name": "chat-gateway", "namespace": "team"},
        "spec": {"rules": [{"host": "theirs.example.com"}]},
    }

    async def story(world):
        kube = world.kube
        ask(world, 1, INGRESS)
        await world.until(lambda: route_of(world).get("reason") == "RouteRefused")
        assert "the Ingress chat-gateway exists and is not ours" in route_of(world)["message"]
        assert kube.objects[ENTRY]["spec"] == theirs["spec"]
        assert kube.named("RayCluster")
        assert world.reason("Accepted") == "Valid"
        assert world.reason("Degraded") == "RouteRefused"
        await world.rest()
        kube.remove(ENTRY)
        ask(world, 2, INGRESS)
        await world.until(lambda: kube.objects.get(ENTRY, theirs)["spec"] != theirs["spec"])
        await world.until(lambda: route_of(world)["reason"] == "Pending")

    with_world(story, prepare=lambda kube: kube.put(theirs))


def test_a_webhook_that_fails_keeps_the_status_from_nothing():
    async def story(world):
        kube = world.kube
        kube.refusals["apply", "/ingresses/chat-gateway"] = KubeError(500, "failed calling webhook")
        ask(world, 1, INGRESS)
        await world.until(lambda: route_of(world).get("reason") == "RouteRefused")
        assert "failed calling webhook" in route_of(world)["message"]
        assert kube.named("Deployment") == ["chat-gateway"]

    with_world(story)


def test_a_cluster_without_the_gateway_api_gets_the_route_once_it_has_the_api(monkeypatch):
    """The kind is listed again by a reconcile of a service that needs it, long before the next list is due."""
    monkeypatch.setattr("rayloom_operator.kube.reflector._UNKNOWN_DELAY_S", 1000.0)
    missing = ("list", "/httproutes")
    collection = "/apis/gateway.networking.k8s.io/v1/httproutes"

    async def story(world):
        kube = world.kube
        ask(world, 1, HTTP)
        await world.until(lambda: route_of(world).get("reason") == "GatewayApiMissing")
        await world.rest()
        assert ("apply", ROUTE) not in kube.calls
        assert kube.lists.count(collection) == 1
        del kube.refusals[missing]
        (reflector,) = [each for each in world.controller._drift.reflectors if each._kind == "HTTPRoute"]
        reflector._alive_at[collection] -= 1000.0
        world.controller._queue.add(("team", "chat"))  # like the reconcile that is scheduled after 10 s
        await world.until(lambda: ROUTE in kube.objects)
        assert kube.lists.count(collection) == 2

    def prepare(kube):
        kube.refusals[missing] = KubeError(NOT_FOUND, "the server could not find the requested resource")

    with_world(story, prepare=prepare)
