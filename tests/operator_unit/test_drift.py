"""Changes of objects by others: a watch reports a change, and a restarted operator finds a change by a comparison."""

import asyncio
import copy
from dataclasses import replace

import msgspec
import pytest

from rayloom_operator.kube import reflector
from rayloom_operator.kube.client import KubeError
from rayloom_operator.objects.companions import client_service, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.observe import drift as module
from rayloom_operator.observe.applied_fields import SHAPES
from rayloom_operator.observe.drift import Drift
from rayloom_operator.resolve.revision import revision, with_kept_image
from rt_fake_kube import FakeKube
from rt_operator import make_resolved, make_service

KEY = ("team", "chat")


def service(version="1", uid="u", kind="Service"):
    labels = {"rayloom.dev/service": "chat"}
    meta = {"name": "chat", "namespace": "team", "uid": uid, "resourceVersion": version, "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta}


@pytest.mark.parametrize(
    ("wrote", "events", "is_drift"),
    [
        (["1"], [], False),
        (["1"], [("ADDED", "1")], False),
        (["1"], [("MODIFIED", "2")], True),
        (["1"], [("ADDED", "1"), ("DELETED", "1")], True),
        (["1", "2"], [("ADDED", "1"), ("MODIFIED", "2")], False),
        ([], [("ADDED", "1")], False),
    ],
)
def test_only_a_change_by_somebody_else_is_drift(wrote, events, is_drift):
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        reflected = drift.reflectors[0]
        # An event may arrive before the response to the request that caused it.
        for kind, version in events:
            reflected.take(kind, service(version))
        for version in wrote:
            drift.wrote(KEY, service(version))
        assert drift.take(KEY) is is_drift
        assert drift.take(KEY) is False

    asyncio.run(story())


def test_events_of_two_applies_in_quick_succession_are_no_drift():
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        for version in ("1", "2"):
            drift.wrote(KEY, service(version))
        for version in ("1", "2"):
            drift.reflectors[0].take("MODIFIED", service(version))
        assert not drift.take(KEY)
        drift.reflectors[0].take("MODIFIED", service("3"))
        assert drift.take(KEY)

    asyncio.run(story())


def test_a_change_of_an_object_queues_its_service():
    async def story():
        queued = []
        reflected = Drift(FakeKube(), queued.append).reflectors[0]
        reflected.take("MODIFIED", service())
        reflected.take("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        assert queued == [KEY]

    asyncio.run(story())


@pytest.mark.parametrize("change", [{"uid": "v"}, {"labels": {"rayloom.dev/service": "other"}}])
def test_an_object_replaced_by_another_of_its_name_is_drift(change):
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        drift.wrote(KEY, service())
        drift.reflectors[0].take("ADDED", service())
        assert not drift.take(KEY)
        other = service()
        other["metadata"] |= change
        drift.reflectors[0].take("ADDED", other)
        assert drift.take(KEY)

    asyncio.run(story())


def test_services_that_wait_for_a_kind_are_queued_when_it_is_listed():
    async def story():
        kube, queued = FakeKube(), []
        kube.refusals["list", "/httproutes"] = KubeError(404, "not found")
        drift = Drift(kube, queued.append)
        (routes,) = [each for each in drift.reflectors if each._kind == "HTTPRoute"]
        following = asyncio.create_task(routes.run())
        async with asyncio.timeout(60):
            await routes.has_answered.wait()
            for key in (KEY, ("team", "deleted")):
                drift.need_kind(key, "HTTPRoute")
            drift.forget(("team", "deleted"))
            assert drift.unknown_kinds() == {"HTTPRoute"} and queued == []
            kube.refusals.clear()
            routes._alive_at[routes.path] -= 10.0
            drift.need_kind(KEY, "HTTPRoute")
            await routes.is_synced.wait()
            await asyncio.sleep(0)
        assert (drift.unknown_kinds(), queued) == (frozenset(), [KEY])
        # A reconcile that began before the list needs the kind.
        drift.need_kind(("team", "late"), "HTTPRoute")
        assert queued == [KEY, ("team", "late")]
        following.cancel()

    asyncio.run(story())


def test_an_object_deleted_in_a_gap_of_its_watch_is_drift(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def story():
        kube, queued = FakeKube(), asyncio.Queue()
        drift = Drift(kube, queued.put_nowait)
        kube.put(service())
        path = "/api/v1/namespaces/team/services/chat"
        drift.wrote(KEY, kube.objects[path] | {"kind": "Service"})
        following = asyncio.create_task(drift.reflectors[0].run())
        async with asyncio.timeout(60):
            while not kube._watches:
                await asyncio.sleep(0.001)
            assert queued.empty() and not drift.take(KEY)
            del kube.objects[path]
            kube.end_watches("/services", KubeError(410, "too old resource version"))
            assert await queued.get() == KEY
        assert drift.take(KEY)
        following.cancel()

    asyncio.run(story())


def test_a_list_that_is_refused_or_hangs_delays_the_start_little(monkeypatch):
    async def story(kube, limit_s):
        drift = Drift(kube, lambda _: None)
        following = [asyncio.create_task(each.run()) for each in drift.reflectors]
        async with asyncio.timeout(limit_s):
            await drift.listed()
        assert drift.reflectors[0].is_synced.is_set()
        for each in following:
            each.cancel()

    refusing = FakeKube()
    refusing.refusals["list", "/networkpolicies"] = KubeError(403, "forbidden")
    asyncio.run(story(refusing, module._LIST_S / 2))

    class Hanging(FakeKube):
        async def list(self, path, params):
            if path.endswith("/networkpolicies"):
                await asyncio.Event().wait()
            return await super().list(path, params)

    monkeypatch.setattr(module, "_LIST_S", 0.05)
    asyncio.run(story(Hanging(), 10))


def as_returned(manifest, **defaults):
    """The object with the fields that the API server adds."""
    found = copy.deepcopy(manifest)
    found["metadata"] |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return found | ({"spec": found["spec"] | defaults} if "spec" in found else {})


POLICY, BUDGET, CLIENTS = (make(make_service()) for make in (network_policy, disruption_budget, client_service))
PLURALS = {
    "Service": "/services",
    "ServiceAccount": "/serviceaccounts",
    "NetworkPolicy": "/networkpolicies",
    "PodDisruptionBudget": "/poddisruptionbudgets",
}
SERVICE_DEFAULTS = {
    "clusterIP": "10.96.0.7",
    "clusterIPs": ["10.96.0.7"],
    "internalTrafficPolicy": "Cluster",
    "ipFamilies": ["IPv4"],
    "ipFamilyPolicy": "SingleStack",
    "sessionAffinity": "None",
    "type": "ClusterIP",
}


def is_right(manifest, found):
    drift = Drift(FakeKube(), lambda _: None)
    (reflector,) = [each for each in drift.reflectors if each.path.endswith(PLURALS[manifest["kind"]])]
    reflector.take("ADDED", msgspec.convert(found, SHAPES[manifest["kind"]]))
    return drift.is_right(KEY, manifest, drift.take_listed(KEY))


@pytest.mark.parametrize(
    ("manifest", "found"),
    [
        (CLIENTS, as_returned(CLIENTS, **SERVICE_DEFAULTS)),
        (CLIENTS, as_returned(CLIENTS, ports=[CLIENTS["spec"]["ports"][0] | {"nodePort": 30_123}], type="NodePort")),
        (POLICY, as_returned(POLICY)),
        (BUDGET, as_returned(BUDGET) | {"status": {"currentHealthy": 1}}),
        (service_account(make_service()), as_returned(service_account(make_service())) | {"secrets": [{"name": "s"}]}),
    ],
)
def test_defaults_and_fields_of_other_controllers_are_right(manifest, found):
    assert is_right(manifest, found)


@pytest.mark.parametrize(
    ("manifest", "place", "addition"),
    [
        (POLICY, ("ingress", 0, "ports", 0), {"endPort": 9000}),
        (POLICY, ("ingress", 0), {"from": [{"podSelector": {}}]}),
        (POLICY, ("ingress", 1, "from", 0, "namespaceSelector"), {"matchLabels": {"team": "a"}}),
        (POLICY, ("podSelector",), {"matchExpressions": [{"key": "a", "operator": "Exists"}]}),
        (POLICY, ("podSelector", "matchLabels"), {"app": "a"}),
        (CLIENTS, ("selector",), {"app": "a"}),
        (BUDGET, ("selector",), {"matchExpressions": [{"key": "a", "operator": "Exists"}]}),
        (BUDGET, ("selector", "matchLabels"), {"app": "a"}),
        (BUDGET, (), {"minAvailable": 7}),
    ],
)
def test_a_field_that_admits_others_or_selects_other_pods_is_not_right(manifest, place, addition):
    found = as_returned(manifest)
    assert is_right(manifest, found)
    part = found["spec"]
    for name in place:
        part = part[name]
    part |= addition
    assert not is_right(manifest, found)


def test_a_new_default_image_counts_once_the_spec_changes_otherwise():
    first = make_resolved(image="engine:1")
    same = make_resolved(image="engine:2")
    changed = make_resolved(image="engine:2", engine={"args": {"threads": 2}})
    explicit = make_resolved(image="engine:2", engine={"image": "engine:2"})

    assert with_kept_image(same, "engine:1", revision(first)) == replace(same, image="engine:1")
    assert with_kept_image(changed, "engine:1", revision(first)) == changed
    assert with_kept_image(explicit, "engine:1", revision(first)) == explicit
    assert with_kept_image(same, "", "") == same


@pytest.mark.parametrize("make", [service_account, client_service, network_policy, disruption_budget])
def test_the_digest_has_every_field_that_the_operator_applies(make):
    manifest = make(make_service())
    kept = msgspec.convert(manifest, SHAPES[manifest["kind"]])

    assert {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], **kept} == manifest


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("metadata", "labels", "app.kubernetes.io/managed-by"), "somebody"),
        (("metadata", "ownerReferences"), []),
        (("spec", "ports", 0, "targetPort"), 9999),
        (("spec", "ports", 0, "appProtocol"), "h2c"),
    ],
)
def test_an_edit_of_a_service_while_no_operator_ran_is_not_right(place, value):
    found = as_returned(CLIENTS, **SERVICE_DEFAULTS)
    part = found
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    assert not is_right(CLIENTS, found)


def test_an_object_that_was_deleted_before_the_first_reconcile_is_not_right():
    drift = Drift(FakeKube(), lambda _: None)
    found = msgspec.convert(as_returned(CLIENTS), SHAPES["Service"])
    drift.reflectors[0].take("ADDED", found)
    drift.reflectors[0].take("DELETED", found)
    assert not drift.is_right(KEY, CLIENTS, drift.take_listed(KEY))
