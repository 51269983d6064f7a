"""Decisions about the route to gateways: its object, status.gateway.route, conditions, and the next reconcile."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rayloom_operator.api.gateway.route import GatewayRoute
from rayloom_operator.decide.decision import decide
from rayloom_operator.decide.route import RouteSight, judged_route
from rayloom_operator.decide.status import status
from rayloom_operator.observe.observed import ParentReport, SeenRoute
from rayloom_operator.observe.pods import pod
from rayloom_operator.observe.routes import seen_route
from rayloom_operator.times import stamp
from rt_operator import CLOCK, SETTINGS, conditions, make_pod_document, make_resolved, make_serving, turn

HTTP = {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}
INGRESS = {"host": "llm.example.com"}
BY_HTTP = make_resolved(gateway={"replicas": 1, "route": {"httpRoute": HTTP}})
BY_INGRESS = make_resolved(gateway={"replicas": 1, "route": {"ingress": INGRESS}})
PLAIN = make_resolved(gateway={"replicas": 1})
STORED = {"gateway": {"replicas": 1, "ready": 1, "reason": "Ready"}, "endpoint": "http://chat-gateway.team.svc:8000"}
PUBLIC = "Gateway public in namespace team"
UNKNOWN = frozenset({"HTTPRoute"})


def seen(kind="HTTPRoute", *, age_s=5.0, **facts):
    return {kind: SeenRoute(uid=f"uid-{kind}", created_at=CLOCK - timedelta(seconds=age_s), **facts)}


def report(name="public", **facts):
    return ParentReport(**{"name": name, "namespace": "", "section_name": None, "port": None} | facts)


def settled(resolved, **facts):
    """Reconciles a service whose engine and gateway serve."""
    document = make_pod_document("gateway-a", is_head=False, ready=True)
    document["metadata"]["labels"] = {"rayloom.dev/gateway": "chat", "rayloom.dev/service": "chat"}
    document["status"]["containerStatuses"][0]["name"] = "gateway"
    groups = [make_serving(resolved)]
    before = turn(resolved, groups).document
    return turn(resolved, groups, previous=before | STORED, gateways=(pod(document),), **facts)


def made(found):
    kinds = ("HTTPRoute", "Ingress")
    return [each["kind"] for each in found.plan.wanted if each["kind"] in kinds]


def deleted(found):
    return [(each.path.split("/")[-2], each.uid) for each in found.plan.deletions if each.path.endswith("-gateway")]


def shown(found):
    route = found.status.gateway.route
    return route.accepted, route.reason


@pytest.mark.parametrize(
    ("resolved", "facts", "kinds"),
    [
        (PLAIN, {}, []),
        (BY_HTTP, {}, ["HTTPRoute"]),
        (BY_HTTP, {"unknown_kinds": UNKNOWN}, []),
        (BY_INGRESS, {"unknown_kinds": UNKNOWN}, ["Ingress"]),
    ],
)
def test_the_wanted_kind_is_applied_if_the_cluster_knows_it(resolved, facts, kinds):
    assert made(settled(resolved, **facts)) == kinds


def test_no_route_is_created_before_the_service_that_it_leads_to():
    first = turn(BY_HTTP)

    assert made(first) == []
    assert shown(first) == (False, "Pending")
    assert made(turn(BY_HTTP, previous=first.document)) == ["HTTPRoute"]


def test_routes_that_are_not_wanted_are_deleted():
    both = seen(parents=(report(),)) | seen("Ingress", address="192.0.2.1")

    assert deleted(settled(BY_HTTP, routes=both)) == [("ingresses", "uid-Ingress")]
    assert deleted(settled(BY_INGRESS, routes=both)) == [("httproutes", "uid-HTTPRoute")]
    found = settled(PLAIN, routes=both)
    assert deleted(found) == [("httproutes", "uid-HTTPRoute"), ("ingresses", "uid-Ingress")]
    assert {each.owner_uid for each in found.plan.deletions} == {PLAIN.service.metadata.uid}
    assert found.status.gateway.route is None
    without_gateways = make_resolved()
    gone = turn(without_gateways, [make_serving(without_gateways)], routes=seen())
    assert deleted(gone) == [("httproutes", "uid-HTTPRoute")]


def test_a_route_of_the_other_kind_stays_until_the_wanted_one_is_accepted():
    """The new route may fail: a webhook refuses it, the cluster does not know its kind, or no controller accepts it."""
    refused = report(refused="Accepted", reason="NotAllowedByListeners", message="no listener")
    entry = seen("Ingress", address="192.0.2.1")
    for resolved, routes, facts in (
        (BY_INGRESS, seen(), {}),
        (BY_INGRESS, seen() | seen("Ingress"), {}),
        (BY_HTTP, entry, {"unknown_kinds": UNKNOWN}),
        (BY_HTTP, entry | seen(), {}),
        (BY_HTTP, entry | seen(age_s=61), {}),
        (BY_HTTP, entry | seen(parents=(refused,)), {}),
    ):
        found = settled(resolved, routes=routes, **facts)
        kept, wanted = ("HTTPRoute", "Ingress") if resolved is BY_INGRESS else ("Ingress", "HTTPRoute")
        assert deleted(found) == []
        assert found.status.gateway.route.message.endswith(
            f" The {kept} of the same name, from an earlier spec, stays until the {wanted} is accepted; delete it if "
            "no client uses it."
        )
    accepted = settled(BY_HTTP, routes=entry | seen(parents=(report(),)))
    assert deleted(accepted) == [("ingresses", "uid-Ingress")]
    assert accepted.status.gateway.route.message == "Every Gateway has accepted the HTTPRoute."


def test_an_operator_without_routes_closes_them_and_keeps_the_service():
    closed = replace(SETTINGS, permissions=replace(SETTINGS.permissions, routes=False))
    open_ = settled(BY_HTTP, routes=seen(parents=(report(),)))
    found = decide(replace(open_.situation, settings=closed))
    document = status(replace(open_.situation, settings=closed)).model_dump(mode="json", by_alias=True)

    kinds = [each["kind"] for each in found.plan.wanted]
    assert "HTTPRoute" not in kinds
    assert set(kinds) == {each["kind"] for each in open_.plan.wanted} - {"HTTPRoute"}
    assert [each.uid for each in found.plan.deletions] == ["uid-HTTPRoute"]
    route = document["gateway"]["route"]
    assert (route["accepted"], route["reason"]) == (False, "NotAllowed")
    assert "remove the route, or let whoever runs the operator set routes.allow" in route["message"]
    assert conditions(document)["Degraded"] == ("True", "NotAllowed")
    assert conditions(document)["Available"] == ("True", "Serving")
    assert conditions(document)["Accepted"] == ("True", "Valid")


def annotated(kind, **annotations):
    parts = {"ingress": INGRESS, "httpRoute": HTTP}[kind]
    return make_resolved(gateway={"replicas": 1, "route": {kind: parts | {"annotations": annotations}}})


def allowing(*keys):
    return replace(SETTINGS, permissions=replace(SETTINGS.permissions, route_annotations=keys))


@pytest.mark.parametrize(
    "key",
    [
        "haproxy-ingress.github.io/config-backend",
        "nginx.ingress.kubernetes.io/auth-secret",
        "nginx.ingress.kubernetes.io/auth-tls-secret",
        "nginx.ingress.kubernetes.io/proxy-ssl-secret",
        "nginx.ingress.kubernetes.io/server-alias",
        "zalando.org/skipper-routes",
        "example.com/of-a-new-controller",
    ],
)
def test_an_annotation_that_the_operator_does_not_list_closes_the_route_alone(key):
    resolved = annotated("ingress", **{key: "x"})
    found = settled(resolved, routes=seen("Ingress", address="192.0.2.1"))

    assert (made(found), deleted(found)) == ([], [("ingresses", "uid-Ingress")])
    assert shown(found) == (False, "NotAllowed")
    assert f"this operator does not allow {key}, " in found.status.gateway.route.message
    assert "let whoever runs the operator add the keys to routes.annotations" in found.status.gateway.route.message
    assert conditions(found.document)["Degraded"] == ("True", "NotAllowed")
    assert conditions(found.document)["Available"] == ("True", "Serving")
    listed = decide(replace(found.situation, settings=allowing(key)))
    assert "Ingress" in [each["kind"] for each in listed.plan.wanted]


@pytest.mark.parametrize(
    ("allowed", "key", "kinds"),
    [
        (("example.com/*",), "example.com/a", ["Ingress"]),
        (("example.com/*",), "example.comma/a", []),
        (("example.com/a",), "example.com/ab", []),
        (("*",), "example.com/a", ["Ingress"]),
        ((), "nginx.ingress.kubernetes.io/proxy-body-size", []),
    ],
)
def test_a_listed_key_is_whole_unless_it_ends_with_a_star(allowed, key, kinds):
    found = settled(annotated("ingress", **{key: "x"}))
    wanted = decide(replace(found.situation, settings=allowing(*allowed))).plan.wanted

    assert [each["kind"] for each in wanted if each["kind"] == "Ingress"] == kinds


def test_the_annotations_for_streams_are_allowed_by_default_and_those_of_an_httproute_always():
    nginx = {f"nginx.ingress.kubernetes.io/proxy-{each}": "1" for each in ("buffering", "read-timeout", "body-size")}

    assert made(settled(annotated("ingress", **nginx))) == ["Ingress"]
    assert made(settled(annotated("httpRoute", **{"example.com/any": "x"}))) == ["HTTPRoute"]


def test_the_status_has_the_url_and_the_endpoint_stays_inside_the_cluster():
    found = settled(BY_HTTP, routes=seen(parents=(report(),)))

    assert found.document["gateway"]["route"] == {
        "kind": "HTTPRoute",
        "url": "https://llm.example.com/v1",
        "accepted": True,
        "reason": "Accepted",
        "message": "Every Gateway has accepted the HTTPRoute.",
    }
    assert found.document["endpoint"] == "http://chat-gateway.team.svc:8000"


REFUSED = report(refused="Accepted", reason="NotAllowedByListeners", message="no listener\nallows this namespace")
WITHOUT_MESSAGE = report(refused="Accepted", reason="NoMatchingParent", message="")
UNRESOLVED = report(refused="ResolvedRefs", reason="BackendNotFound", message="no Service")


@pytest.mark.parametrize(
    ("resolved", "facts", "reason", "part"),
    [
        (
            BY_HTTP,
            {"routes": seen(parents=(REFUSED,))},
            "RouteNotAccepted",
            f"{PUBLIC} does not accept the HTTPRoute: NotAllowedByListeners: no listener allows this namespace",
        ),
        (
            BY_HTTP,
            {"routes": seen(parents=(WITHOUT_MESSAGE,))},
            "RouteNotAccepted",
            f"{PUBLIC} does not accept the HTTPRoute: NoMatchingParent",
        ),
        (
            BY_HTTP,
            {"routes": seen(parents=(UNRESOLVED,))},
            "RouteNotAccepted",
            f"{PUBLIC} cannot follow the HTTPRoute to the Service: BackendNotFound: no Service",
        ),
        (
            BY_HTTP,
            {"routes": seen(age_s=61)},
            "RouteNotAccepted",
            f"No controller has accepted the HTTPRoute for {PUBLIC}. Check that this Gateway exists",
        ),
        (
            BY_HTTP,
            {"unknown_kinds": UNKNOWN},
            "GatewayApiMissing",
            "Install the CustomResourceDefinition httproutes.gateway.networking.k8s.io",
        ),
    ],
)
def test_a_route_that_leads_nowhere_is_a_fault_of_a_service_that_stays_available(resolved, facts, reason, part):
    found = settled(resolved, **facts)
    said = {each["type"]: each["message"] for each in found.document["conditions"]}

    assert shown(found) == (False, reason)
    assert part in found.status.gateway.route.message
    assert conditions(found.document)["Degraded"] == ("True", reason)
    assert part in said["Degraded"]
    assert conditions(found.document)["Available"] == ("True", "Serving")
    assert conditions(found.document)["Accepted"] == ("True", "Valid")


def test_a_refused_write_is_a_fault_until_a_write_succeeds():
    refused = replace(settled(BY_INGRESS).situation, route_refusal="the Ingress chat-gateway exists and is not ours")
    document = status(refused).model_dump(mode="json", by_alias=True)

    assert document["gateway"]["route"]["reason"] == "RouteRefused"
    assert conditions(document)["Degraded"] == ("True", "RouteRefused")
    assert conditions(document)["Available"] == ("True", "Serving")


@pytest.mark.parametrize(
    ("resolved", "facts"),
    [
        (BY_HTTP, {}),
        (BY_HTTP, {"routes": seen()}),
        (BY_HTTP, {"routes": seen(parents=(report("other"), report(namespace="edge"), report(port=443)))}),
        (BY_INGRESS, {"routes": seen("Ingress", age_s=9999)}),
    ],
)
def test_a_route_without_an_answer_waits_and_is_no_fault(resolved, facts):
    found = settled(resolved, **facts)

    assert shown(found) == (False, "Pending")
    assert conditions(found.document)["Degraded"] == ("False", "Healthy")


def test_an_ingress_with_an_address_is_accepted():
    found = settled(BY_INGRESS, routes=seen("Ingress", address="10.0.0.1"))

    assert shown(found) == (True, "Accepted")
    assert "10.0.0.1" in found.status.gateway.route.message


def test_every_gateway_has_to_accept():
    parents = [{"name": "a", "namespace": "edge", "sectionName": "https"}, {"name": "b", "port": 443}]
    route = GatewayRoute.model_validate({"httpRoute": HTTP | {"parentRefs": parents}})
    first = report("a", namespace="edge", section_name="https")
    second = report("b", namespace="team", port=443)  # controllers may fill in the namespace
    for parents, reason in (((first, second), "Accepted"), ((first,), "Pending"), ((second,), "Pending")):
        (found,) = seen(parents=parents).values()
        sight = RouteSight(seen=found, now=CLOCK)
        assert judged_route(route, "team", sight).reason == reason


@pytest.mark.parametrize(
    ("parent", "named"),
    [
        ({"port": 80}, "(port 80)"),
        ({"port": 8080}, "(port 8080)"),
        ({"sectionName": "inner"}, "(listener inner)"),
        ({"sectionName": "outer", "port": 443}, "(listener outer, port 443)"),
    ],
)
def test_parents_of_one_gateway_are_judged_and_named_apart(parent, named):
    """Three of four parentRefs of the same Gateway are accepted. The message is about the fourth."""
    parents = [{"port": 80}, {"port": 8080}, {"sectionName": "inner"}, {"sectionName": "outer", "port": 443}]
    route = GatewayRoute.model_validate({"httpRoute": HTTP | {"parentRefs": [{"name": "public"} | p for p in parents]}})
    others = tuple(
        report(section_name=each.get("sectionName"), port=each.get("port")) for each in parents if each != parent
    )
    refusal = report(
        section_name=parent.get("sectionName"), port=parent.get("port"), refused="Accepted", reason="NoMatchingParent"
    )

    def judged(reports, age_s=5.0):
        (found,) = seen(parents=reports, age_s=age_s).values()
        status = judged_route(route, "team", RouteSight(seen=found, now=CLOCK))
        return status.reason, status.message

    assert judged((*others, replace(refusal, refused="", reason=""))) == (
        "Accepted",
        "Every Gateway has accepted the HTTPRoute.",
    )
    assert judged((*others, refusal)) == (
        "RouteNotAccepted",
        f"{PUBLIC} {named} does not accept the HTTPRoute: NoMatchingParent",
    )
    assert judged(others) == (
        "Pending",
        f"No controller has reported about the HTTPRoute for {PUBLIC} {named} yet.",
    )
    late = judged(others, age_s=61)
    assert late[0] == "RouteNotAccepted"
    assert late[1].startswith(f"No controller has accepted the HTTPRoute for {PUBLIC} {named}. ")


def test_the_next_reconcile_looks_for_the_kind_and_for_an_answer_in_time():
    absent = decide(settled(BY_HTTP, unknown_kinds=UNKNOWN).situation).requeue_after_s
    silent = decide(settled(BY_HTTP, routes=seen(age_s=58)).situation).requeue_after_s
    calm = decide(settled(BY_HTTP, routes=seen(parents=(report(),))).situation).requeue_after_s

    assert (absent <= 10, silent <= 2, calm > 10) == (True, True, True)


def test_nothing_is_forgotten_while_the_spec_cannot_be_used():
    before = settled(BY_HTTP, routes=seen(parents=(report(),))).document
    found = turn(None, previous=before, problems=("spec: wrong",), routes=seen())

    assert (made(found), deleted(found)) == ([], [])
    assert found.document["gateway"]["route"] == before["gateway"]["route"]


def test_answers_about_an_earlier_spec_are_not_read():
    def condition(kind, holds, generation):
        return {
            "type": kind,
            "status": holds,
            "observedGeneration": generation,
            "reason": "Because",
            "message": "of it",
        }

    parent = {"parentRef": {"name": "public", "namespace": "edge", "sectionName": "https", "port": 443}}
    old = [condition("Accepted", "False", 1)]
    new = [condition("Accepted", "True", 2), condition("ResolvedRefs", "False", 2)]
    found = {
        "metadata": {"uid": "u", "generation": 2, "creationTimestamp": stamp(CLOCK)},
        "status": {"parents": [parent | {"conditions": old}]},
    }
    assert seen_route(found).parents == ()
    found["status"]["parents"][0]["conditions"] = new
    expected = report(
        namespace="edge", section_name="https", port=443, refused="ResolvedRefs", reason="Because", message="of it"
    )
    assert seen_route(found).parents == (expected,)
    ingress = {"metadata": {"uid": "u"}, "status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}}
    assert seen_route(ingress).address == "10.0.0.1"
