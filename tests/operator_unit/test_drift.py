"""Who else changed an object, and what of that matters; a default of the operator's that changes."""

import asyncio
import copy
from dataclasses import replace

import pytest

from rayloom_operator.kube import reflector
from rayloom_operator.kube.client import KubeError
from rayloom_operator.objects.companions import client_service, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.observe import drift as module
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
def test_only_what_somebody_else_did_is_drift(wrote, events, is_drift):
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        teller = drift.reflectors[0]
        # News may come before the answer to the request that made it.
        for kind, version in events:
            teller._take(kind, service(version))
        for version in wrote:
            drift.wrote(KEY, service(version))
        assert drift.take(KEY) is is_drift
        assert drift.take(KEY) is False

    asyncio.run(story())


def test_each_of_its_objects_that_changes_has_the_service_looked_at():
    async def story():
        told = []
        teller = Drift(FakeKube(), told.append).reflectors[0]
        teller._take("MODIFIED", service())
        teller._take("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        assert told == [KEY]

    asyncio.run(story())


@pytest.mark.parametrize("change", [{"uid": "v"}, {"labels": {"rayloom.dev/service": "other"}}])
def test_what_another_one_of_its_name_has_replaced_is_gone(change):
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        drift.wrote(KEY, service())
        drift.reflectors[0]._take("ADDED", service())
        assert not drift.take(KEY)
        other = service()
        other["metadata"] |= change
        drift.reflectors[0]._take("ADDED", other)
        assert drift.take(KEY)

    asyncio.run(story())


def test_what_went_in_a_gap_of_its_watch_is_told(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def story():
        kube, told = FakeKube(), asyncio.Queue()
        drift = Drift(kube, told.put_nowait)
        kube.put(service())
        path = "/api/v1/namespaces/team/services/chat"
        drift.wrote(KEY, kube.objects[path] | {"kind": "Service"})
        following = asyncio.create_task(drift.reflectors[0].run())
        async with asyncio.timeout(10):
            while not kube._watches:
                await asyncio.sleep(0.001)
            assert told.empty() and not drift.take(KEY)
            del kube.objects[path]
            kube.end_watches("/services", KubeError(410, "too old resource version"))
            assert await told.get() == KEY
        assert drift.take(KEY)
        following.cancel()

    asyncio.run(story())


def test_a_list_that_is_refused_or_hangs_delays_little(monkeypatch):
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
    """The object with what the API server adds to it."""
    found = copy.deepcopy(manifest)
    found["metadata"] |= {"uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return found | ({"spec": found["spec"] | defaults} if "spec" in found else {})


POLICY, BUDGET, CLIENTS = (make(make_service()) for make in (network_policy, disruption_budget, client_service))
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
    packed = drift._packers[manifest["kind"]].pack(found)
    return drift.is_right(KEY, manifest, {(manifest["kind"], manifest["metadata"]["name"]): packed})


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
def test_defaults_and_what_others_may_add_are_right(manifest, found):
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
def test_what_lets_others_in_or_selects_other_pods_is_not_right(manifest, place, addition):
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
