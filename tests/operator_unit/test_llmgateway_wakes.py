"""A service that has neither engines nor gateway pods of its own, behind an LLMGateway with simulated pods."""

import contextlib

from aiohttp import web

from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.observed import ServingGateway
from rt_fake_kube import FakeKube
from rt_llmgateway import make_gateway_document, make_service_document, with_gateways
from rt_operator import SETTINGS, make_pod
from rt_poller import GOOD
from rt_world import SERVICE, service, with_world

SPEC = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}, "gateway": {"replicas": 0}, "replicas": 0}
AT_ZERO = {"status": {"autoscaling": {"desiredReplicas": 0, "reason": "ScaledToZero", "message": "m"}}}
TOKEN, _ = SETTINGS.admin_tokens("team", "uid-public", "public-llmgateway")
POD = make_pod("public-llmgateway-a", is_head=False, ip="127.0.0.1")
PUBLIC = ServingGateway(name="public", uid="uid-public", model="org/chat", replicas=1, pods=(POD,))


@contextlib.asynccontextmanager
async def answering(monkeypatch, answer):
    """An admin port on loopback, which replaces the admin port of every pod."""
    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(engine_poller, "ADMIN_PORT", runner.addresses[0][1])
    try:
        yield
    finally:
        await runner.cleanup()


def replicas(kube):
    return kube.objects[SERVICE]["spec"]["replicas"]


def scaling(kube):
    return kube.statuses[-1].get("autoscaling", {}) if kube.statuses else {}


def test_a_request_that_an_llmgateway_holds_starts_an_engine(monkeypatch):
    asked = []

    async def answer(request):
        asked.append((request.query["model"], request.headers["Authorization"]))
        said = GOOD | {"ranks": [], "requests": {"waiting": 1 if len(asked) > 1 else 0}, "uptime_seconds": 100.0}
        return web.json_response(said)

    async def story(world):
        world.controller.watches.llmgateways_of = lambda key: (PUBLIC,)
        async with answering(monkeypatch, answer):
            world.ask_for(service(**SPEC) | AT_ZERO)
            await world.until(lambda: replicas(world.kube) == 1)
            await world.until(lambda: scaling(world.kube).get("reason") == "Woken")
        assert set(asked) == {("org/chat", f"Bearer {TOKEN}")}
        assert "1 requests held" in scaling(world.kube)["message"]

    with_world(story)


def test_a_service_that_no_gateway_pod_serves_gets_an_engine_at_once():
    async def story(world):
        world.ask_for(service(**SPEC) | AT_ZERO)
        await world.until(lambda: replicas(world.kube) == 1)
        await world.until(lambda: scaling(world.kube).get("reason") == "Bounded")
        assert "minReplicas 0 counts as 1" in scaling(world.kube)["message"]

    with_world(story)


def test_while_llmgateways_are_not_known_yet_a_service_at_zero_stays_there():
    async def story(world):
        world.controller.watches.llmgateways_of = lambda key: None
        world.ask_for(service(**SPEC) | AT_ZERO)
        await world.until(lambda: world.kube.statuses)
        await world.rest()
        assert (replicas(world.kube), world.reason()) == (0, "ScaledToZero")

    with_world(story)


def test_an_llmgateway_names_the_services_that_its_pods_serve():
    services = (
        make_service_document(model={"source": "builtin://smollm2-135m", "servedName": "assistant"}),
        make_service_document("young", created="2026-02-01T00:00:00Z", model={"servedName": "assistant"}),
        make_service_document("private", labels={}),
    )

    async def story(world):
        await world.until(lambda: world.kube.named("Deployment"))
        world.show_pods(2)
        await world.rest()
        (found,) = world.controller.serving(("team", "chat"))
        assert (found.name, found.uid, found.model, found.replicas) == ("public", "uid-public", "assistant", 2)
        assert [each.name for each in found.pods] == ["gateway-0", "gateway-1"]
        for other in ("young", "private"):  # the older service owns the name, and the third has no label
            assert world.controller.serving(("team", other)) == ()
        assert world.controller.serving(("elsewhere", "chat")) == ()

    with_gateways(story, prepare=lambda world: world.kube.put(make_gateway_document()), services=services)


def test_after_a_restart_an_llmgateway_with_a_spec_that_cannot_be_read_serves_what_its_status_lists():
    services = (
        make_service_document(model={"source": "builtin://smollm2-135m", "servedName": "assistant"}),
        make_service_document("young", created="2026-02-01T00:00:00Z", model={"servedName": "assistant"}),
    )
    kube = FakeKube()

    async def settle(world):
        await world.until(lambda: world.status.get("models"))
        await world.rest()

    async def restarted(world):
        await world.until(lambda: world.condition("Accepted").get("reason") == "InvalidSpec")
        (found,) = world.controller.serving(("team", "chat"))
        assert (found.name, found.uid, found.model, found.replicas) == ("public", "uid-public", "assistant", 2)
        assert world.controller.serving(("team", "young")) == ()

    kube.put(make_gateway_document(replicas=2))
    with_gateways(settle, kube=kube, services=services)
    status = kube.objects[kube.path("LLMGateway")]["status"]
    kube.put(make_gateway_document(replicas=17) | {"status": status})
    with_gateways(restarted, kube=kube, services=services)


def test_a_terminating_llmgateway_leaves_the_others_of_its_namespace_known():
    ending = make_gateway_document("ending")
    ending["metadata"] |= {"uid": "uid-ending", "deletionTimestamp": "2026-03-01T00:00:00Z"}

    def prepare(world):
        world.kube.put(ending)
        world.kube.put(make_gateway_document())

    async def story(world):
        await world.until(lambda: world.controller.serving(("team", "chat")))
        assert [each.name for each in world.controller.serving(("team", "chat"))] == ["public"]
        await world.rest()
        meta = {"uid": "uid-public", "deletionTimestamp": "2026-03-01T00:00:00Z"}
        found = make_gateway_document()
        world.kube.put(found | {"metadata": found["metadata"] | meta})
        await world.until(lambda: world.controller.serving(("team", "chat")) == ())

    with_gateways(story, prepare=prepare, kube=FakeKube(), services=(make_service_document(),))


def test_before_its_first_reconcile_an_llmgateway_may_serve_every_service():
    async def story(world):
        await world.until(lambda: world.controller._in_namespace.get("team"))
        assert world.controller.serving(("team", "chat")) is None
        world.are_known = True
        await world.until(lambda: world.controller.serving(("team", "chat")) is not None)

    def prepare(world):
        world.are_known = False
        world.kube.put(make_gateway_document())

    with_gateways(story, prepare=prepare, kube=FakeKube(), services=(make_service_document(),))
