"""A service that the operator's settings do not (or no longer) allow: its engines stay reachable and can be deleted."""

from dataclasses import replace

import pytest

import rt_world
from rayloom_operator.decide.changes.held import held_plan
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.changes.routes import Route
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.names import path_of
from rayloom_operator.objects.companions import client_service
from rayloom_operator.objects.guards import network_policy
from rayloom_operator.observe.observed import Observed
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_operator import (
    CLOCK,
    SETTINGS,
    make_group,
    make_pod,
    make_resolved,
    make_service,
    make_serving,
    make_situation,
    waiting,
)
from rt_world import SERVICE, known, service, with_world

NOW = 1000.0


NOTHING = Plan()


def held(groups, replicas, planned=NOTHING):
    situation = make_situation(observed=Observed(replicas=tuple(groups)), now=Now(CLOCK, NOW))
    return held_plan(planned, make_service(replicas=replicas), situation)


def serving(number):
    return make_serving(make_resolved(replicas=3), number)


def gone(found):
    return [each.path.rpartition("/")[2] for each in found.deletions if "/rayclusters/" in each.path]


def test_without_engines_nothing_is_made():
    planned = Plan()

    assert held((), 1, planned) is planned


def test_running_engines_keep_their_service_and_their_disruption_budget():
    found = held([serving(0)], 1)

    assert [each["kind"] for each in found.wanted] == [
        "ServiceAccount",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
    ]
    assert (found.deletions, found.new) == ((), frozenset())


@pytest.mark.parametrize(("replicas", "going"), [(3, []), (2, [2]), (1, [1, 2]), (0, [0, 1, 2])])
def test_engines_beyond_the_replicas_leave_the_service_and_go(replicas, going):
    groups = [serving(number) for number in range(3)]
    found = held(groups, replicas)
    names = [groups[number].name for number in going]

    assert gone(found) == names
    assert [(each.pod.uid, each.wanted) for each in found.routes] == [
        (groups[number].head.uid, False) for number in going if groups[number].head.is_routed
    ]
    # Each engine's Secret, ConfigMap and RayCluster are deleted, the RayCluster in the foreground.
    assert len(found.deletions) == 3 * len(going)
    assert all(each.is_foreground for each in found.deletions if "/rayclusters/" in each.path)


def test_an_engine_that_does_not_serve_goes_before_one_that_does():
    starting = make_group(make_pod(engine=waiting("ContainerCreating")))
    well = serving(1)

    assert gone(held([starting, well], 1)) == [starting.name]


def test_an_engine_that_goes_is_not_routed_to_again():
    one = serving(0)
    again = Plan(routes=(Route(pod=one.head, wanted=True),))

    assert [each.wanted for each in held([one], 0, again).routes if each.pod.uid == one.head.uid] != [True]
    assert held([one], 1, again).routes == again.routes


def test_a_setting_that_is_taken_away_leaves_the_service_repaired_and_fewer_replicas_possible(monkeypatch):
    kube = FakeKube()
    source = "file:///models/x"

    async def allowed(world):
        world.ask_for(service(model={"source": source}) | known(source))
        await world.until(lambda: kube.named("RayCluster"))
        await world.rest()

    async def forbidden(world):
        made = kube.named("RayCluster")
        world.ask_for(kube.objects[SERVICE])
        await world.until(lambda: world.reason("Accepted") == "NotAllowed")
        await world.rest()
        assert kube.named("RayCluster") == made != []
        for each in (client_service(make_service()), network_policy(make_service())):
            kube.put(kube.objects[path_of(each)] | {"spec": {}})
            await world.until(lambda each=each: kube.objects[path_of(each)]["spec"] == each["spec"])
        world.ask_for(kube.objects[SERVICE] | {"spec": service(model={"source": source}, replicas=0)["spec"]})
        await world.until(lambda: kube.named("RayCluster") == [])
        await world.rest()
        assert kube.named("Secret") == kube.named("ConfigMap") == []
        assert world.reason("Accepted") == "NotAllowed"

    with_world(allowed, kube=kube)
    monkeypatch.setattr(rt_world, "SETTINGS", replace(SETTINGS, permissions=Permissions()))
    with_world(forbidden, kube=kube)
