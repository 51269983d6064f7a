"""The route of an LLMGateway: its object, faults and end, as decisions and on a cluster that is a dictionary."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.llmgateway.plan import gateway_plan, requeue_after_s
from rayloom_operator.decide.llmgateway.situation import GatewaySituation, names_of
from rayloom_operator.decide.llmgateway.status import gateway_status
from rayloom_operator.errors import SpecError
from rayloom_operator.kube.client import NOT_FOUND, KubeError
from rayloom_operator.observe.observed import ParentReport, SeenRoute
from rayloom_operator.times import Now
from rt_llmgateway import make_gateway_document, make_service_document, with_gateways
from rt_operator import CLOCK, SETTINGS

HTTP = {"httpRoute": {"parentRefs": [{"name": "edge"}], "hostnames": ["llm.example.com"], "path": "/v1"}}
INGRESS = {"ingress": {"host": "llm.example.com", "path": "/v1", "annotations": {"cert-manager.io/issuer": "x"}}}
ENTRY = "/apis/networking.k8s.io/v1/namespaces/team/ingresses/public-llmgateway"
ROUTE = "/apis/gateway.networking.k8s.io/v1/namespaces/team/httproutes/public-llmgateway"
CHAT = make_service_document()
UNKNOWN = frozenset({"HTTPRoute"})
ACCEPTED = ParentReport(name="edge", namespace="", section_name=None, port=None)
REFUSED = ParentReport(
    name="edge",
    namespace="",
    section_name=None,
    port=None,
    refused="Accepted",
    reason="NotAllowedByListeners",
    message="no listener allows this namespace",
)
BARE, _ = names_of(parse_gateway(make_gateway_document()), (make_service_document("bare", gateway=None),))


def seen(kind="HTTPRoute", *, age_s=5.0, **facts):
    return {kind: SeenRoute(uid=f"uid-{kind}", created_at=CLOCK - timedelta(seconds=age_s), **facts)}


def situation(route=None, *, previous=None, is_readable=True, **facts):
    spec = {"route": route} if route else {}
    return GatewaySituation(
        now=Now(CLOCK, 0.0),
        settings=SETTINGS,
        generation=1,
        previous=previous or {},
        gateway=parse_gateway(make_gateway_document(**spec)) if is_readable else None,
        accepted=VALID,
        **facts,
    )


def made(found):
    return [each for each in gateway_plan(found).wanted if each["kind"] in ("HTTPRoute", "Ingress")]


def deleted(found):
    return [(each.path, each.uid, each.owner_uid) for each in gateway_plan(found).deletions]


def condition(found, kind):
    (one,) = [each for each in gateway_status(found).conditions if each.type == kind]
    return one


def test_the_route_leads_to_the_service_of_the_gateway_pods():
    (route,) = made(situation(HTTP))

    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "", "kind": "Service", "name": "public-llmgateway", "port": 8000, "weight": 1}
    ]
    assert rule["timeouts"] == {"request": "0s"}
    assert route["metadata"]["name"] == "public-llmgateway"
    assert route["metadata"]["labels"]["rayloom.dev/llmgateway"] == "public"
    (owner,) = route["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("LLMGateway", "uid-public")
    (entry,) = made(situation(INGRESS))
    assert entry["kind"] == "Ingress"
    assert made(situation()) == []


def test_an_annotation_that_the_operator_does_not_list_closes_the_route():
    key = "nginx.ingress.kubernetes.io/auth-secret"
    ingress = {"host": "llm.example.com", "annotations": {key: "other/keys"}}
    found = situation({"ingress": ingress}, routes=seen("Ingress"))

    route = gateway_status(found).route
    assert (made(found), deleted(found)) == ([], [(ENTRY, "uid-Ingress", "uid-public")])
    assert (route.accepted, route.reason) == (False, "NotAllowed")
    assert f"this operator does not allow {key}, " in route.message


def test_only_the_wanted_kind_stays():
    both = seen(parents=(ACCEPTED,)) | seen("Ingress", address="192.0.2.1")

    assert deleted(situation(HTTP, routes=both)) == [(ENTRY, "uid-Ingress", "uid-public")]
    assert deleted(situation(INGRESS, routes=both)) == [(ROUTE, "uid-HTTPRoute", "uid-public")]
    assert [path for path, _, _ in deleted(situation(routes=both))] == [ROUTE, ENTRY]
    for routes in (seen(), seen() | seen("Ingress")):
        waiting = situation(INGRESS, routes=routes)
        assert deleted(waiting) == [], "no controller has accepted the wanted one yet"
        assert "The HTTPRoute of the same name, from an earlier spec, stays" in gateway_status(waiting).route.message


@pytest.mark.parametrize(
    ("route", "facts", "reason", "part"),
    [
        (HTTP, {"unknown_kinds": UNKNOWN}, "GatewayApiMissing", "give the route `ingress` in place of `httpRoute`"),
        (HTTP, {"routes": seen(parents=(REFUSED,))}, "RouteNotAccepted", "no listener allows this namespace"),
        (HTTP, {"routes": seen(age_s=61)}, "RouteNotAccepted", "Gateway edge in namespace team"),
        (INGRESS, {"route_refusal": "a webhook refuses it"}, "RouteRefused", "a webhook refuses it"),
    ],
)
def test_a_route_that_leads_nowhere_is_a_fault_beside_those_of_names(route, facts, reason, part):
    found = situation(route, members=BARE, **facts)

    status = gateway_status(found)
    assert (status.route.accepted, status.route.reason) == (False, reason)
    assert part in status.route.message
    assert (condition(found, "Degraded").status, condition(found, "Degraded").reason) == ("True", reason)
    assert part in condition(found, "Degraded").message
    assert "bare cannot be reached" in condition(found, "Degraded").message
    assert condition(found, "Accepted").status == "True"


def test_the_status_has_the_url_and_the_answer():
    found = situation(HTTP, routes=seen(parents=(ACCEPTED,)))

    status = gateway_status(found)
    assert (status.route.url, status.route.accepted) == ("https://llm.example.com/v1", True)
    assert status.endpoint == "http://public-llmgateway.team.svc:8000"
    assert condition(found, "Degraded").reason == "Healthy"
    assert gateway_status(situation()).route is None


def test_an_operator_without_routes_closes_them():
    closed = replace(SETTINGS, permissions=replace(SETTINGS.permissions, routes=False))
    found = replace(situation(HTTP, routes=seen(parents=(ACCEPTED,))), settings=closed)

    assert made(found) == []
    assert deleted(found) == [(ROUTE, "uid-HTTPRoute", "uid-public")]
    assert gateway_status(found).route.reason == "NotAllowed"
    assert condition(found, "Degraded").reason == "NotAllowed"
    assert "set routes.allow" in condition(found, "Degraded").message
    assert condition(found, "Accepted").status == "True"


def test_a_spec_that_cannot_be_read_changes_no_route():
    before = gateway_status(situation(HTTP, routes=seen(parents=(ACCEPTED,)))).model_dump(mode="json", by_alias=True)
    found = situation(is_readable=False, previous=before, routes=seen())

    assert (made(found), deleted(found)) == ([], [])
    assert gateway_status(found).route.accepted
    assert condition(found, "Degraded").reason == "Healthy"


def test_the_next_reconcile_looks_for_the_kind_and_for_an_answer_in_time():
    assert requeue_after_s(situation(HTTP, unknown_kinds=UNKNOWN)) == 10
    assert requeue_after_s(situation(HTTP, routes=seen(age_s=58))) == 2
    assert requeue_after_s(situation(HTTP, routes=seen(parents=(ACCEPTED,)))) == 300


def test_a_route_without_pods_is_refused():
    with pytest.raises(SpecError, match="raise replicas to 1 or more, or remove route"):
        parse_gateway(make_gateway_document(replicas=0, route=HTTP))
    with pytest.raises(SpecError, match="give exactly one of httpRoute and ingress"):
        parse_gateway(make_gateway_document(route={}))


def ask(world, generation, route=None):
    """A user applies the LLMGateway with this route."""
    document = make_gateway_document(**({"route": route} if route else {}))
    document["metadata"]["generation"] = generation
    known = world.kube.objects.get(world.kube.path("LLMGateway")) if generation > 1 else None
    world.kube.put(document | ({"status": known.get("status", {})} if known else {}))


async def replace_the_route(world):
    """Waits for the Ingress, gives it an address like a controller, and then waits for the end of the HTTPRoute."""
    kube = world.kube
    await world.until(lambda: ENTRY in kube.objects and reason_of(world) == "Pending")
    await world.rest()
    assert ROUTE in kube.objects, "clients have no other way yet"
    kube.put(kube.objects[ENTRY] | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}})
    await world.until(lambda: ROUTE not in kube.objects)


def reason_of(world):
    return world.status.get("route", {}).get("reason")


def test_a_route_is_created_mended_replaced_by_the_other_kind_and_removed():
    async def story(world):
        kube = world.kube
        await world.until(lambda: ROUTE in kube.objects)
        await world.rest()
        route = kube.objects[ROUTE]
        kube.put(route | {"spec": route["spec"] | {"hostnames": ["other.example.com"]}})
        await world.until(lambda: kube.objects[ROUTE]["spec"] == route["spec"])
        kube.remove(ROUTE)
        await world.until(lambda: ROUTE in kube.objects)
        await world.rest()
        ask(world, 2, INGRESS)
        await replace_the_route(world)
        await world.until(lambda: reason_of(world) == "Accepted")
        assert world.status["route"]["kind"] == "Ingress"
        await world.rest()
        entry = kube.objects[ENTRY]
        kube.put(entry | {"metadata": entry["metadata"] | {"annotations": {"cert-manager.io/issuer": "other"}}})
        await world.until(lambda: kube.objects[ENTRY]["metadata"]["annotations"] == {"cert-manager.io/issuer": "x"})
        await world.rest()
        ask(world, 3)
        await world.until(lambda: ENTRY not in kube.objects and "route" not in world.status)

    with_gateways(story, prepare=lambda world: ask(world, 1, HTTP), services=[CHAT])


def test_the_former_route_stays_while_the_new_one_is_refused():
    async def story(world):
        kube = world.kube
        await world.until(lambda: ROUTE in kube.objects)
        await world.rest()
        kube.refusals["apply", ENTRY] = KubeError(403, "a webhook denied the request: no Ingress here")
        ask(world, 2, INGRESS)
        await world.until(lambda: reason_of(world) == "RouteRefused")
        await world.rest()
        assert ROUTE in kube.objects and ENTRY not in kube.objects
        kube.refusals.clear()
        ask(world, 3, INGRESS)
        await replace_the_route(world)

    with_gateways(story, prepare=lambda world: ask(world, 1, HTTP), services=[CHAT])


def test_another_owners_ingress_stays_and_the_pods_are_made_nevertheless():
    theirs = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {"name": "public-llmgateway", "namespace": "team"},
        "spec": {"rules": [{"host": "theirs.example.com"}]},
    }

    def prepare(world):
        world.kube.put(theirs)
        ask(world, 1, INGRESS)

    async def story(world):
        await world.until(lambda: reason_of(world) == "RouteRefused")
        assert "the Ingress public-llmgateway exists and is not ours" in world.status["route"]["message"]
        assert world.kube.objects[ENTRY]["spec"] == theirs["spec"]
        assert world.kube.named("Deployment") == ["public-llmgateway"]
        assert world.condition("Accepted")["reason"] == "Valid"
        assert world.condition("Degraded")["reason"] == "RouteRefused"

    with_gateways(story, prepare=prepare, services=[CHAT])


def test_a_cluster_without_the_gateway_api_gets_the_route_once_it_has_the_api(monkeypatch):
    """The kind is listed again by a reconcile of a gateway that needs it, long before the next list is due."""
    monkeypatch.setattr("rayloom_operator.kube.reflector._UNKNOWN_DELAY_S", 1000.0)
    missing = ("list", "/httproutes")

    def prepare(world):
        world.kube.refusals[missing] = KubeError(NOT_FOUND, "the server could not find the requested resource")
        ask(world, 1, HTTP)

    async def story(world):
        await world.until(lambda: reason_of(world) == "GatewayApiMissing")
        await world.rest()
        assert ("apply", ROUTE) not in world.kube.calls
        del world.kube.refusals[missing]
        (reflector,) = [each for each in world.controller._drift.reflectors if each._kind == "HTTPRoute"]
        reflector._alive_at[reflector.path] -= 1000.0
        world.controller._queue.add(("team", "public"))  # like the reconcile that is scheduled after 10 s
        await world.until(lambda: ROUTE in world.kube.objects)

    with_gateways(story, prepare=prepare, services=[CHAT])
