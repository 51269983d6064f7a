"""The plan: objects to create, objects to delete, and the engines that get requests."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.decide.changes.plan import plan
from rayloom_operator.decide.status import status
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.revision import revision
from rayloom_operator.times import Now
from rt_operator import (
    CLOCK,
    crashed,
    make_group,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_service,
    make_serving,
    make_situation,
    restarted,
    settled,
    turn,
    waiting,
)

ONE = make_resolved()
LASTING = ["ServiceAccount", "Service", "PodDisruptionBudget", "NetworkPolicy", "ControllerRevision"]


def kinds(found):
    return [each["kind"] for each in found.plan.wanted]


def made(found):
    return [each["metadata"]["name"][-2:] for each in found.plan.wanted if each["kind"] == "RayCluster"]


def deleted(found):
    return [each.path.split("/")[-1] for each in found.plan.deletions]


def routes(found):
    return [(route.pod.name, route.wanted) for route in found.plan.routes]


def test_a_new_service_gets_its_objects_and_the_cluster_last():
    found = turn(ONE)

    assert kinds(found) == [*LASTING, "ConfigMap", "Secret", "RayCluster"]
    assert (found.plan.deletions, found.plan.routes) == ((), ())


def test_every_replica_gets_objects_of_its_own():
    found = turn(make_resolved(replicas=3))
    own = [each for each in found.plan.wanted if each["kind"] not in LASTING]

    assert made(found) == ["-0", "-1", "-2"]
    assert len({(each["kind"], each["metadata"]["name"]) for each in own}) == 9
    assert {each["metadata"]["labels"]["rayloom.dev/group"] for each in own} == found.plan.new
    tokens = [each["data"]["token"] for each in own if each["kind"] == "Secret"]
    assert len(set(tokens)) == 3


def test_a_running_group_is_left_as_it_is():
    found = turn(ONE, [make_serving(ONE)])

    assert kinds(found) == [*LASTING, "ConfigMap", "Secret"]
    assert found.plan.new == frozenset()
    assert (found.plan.deletions, found.plan.routes) == ((), ())


def test_a_group_that_never_served_goes_with_its_cluster_last_once_that_is_written():
    old = make_group(make_pod(engine=waiting("ContainerCreating")))
    first = turn(ONE, [old])
    found = turn(ONE, [old], previous=first.document)

    assert first.plan.deletions == ()
    assert [(each.path, each.uid, each.is_foreground) for each in found.plan.deletions] == [
        ("/api/v1/namespaces/team/secrets/chat-00000000-0-admin", "", False),
        ("/api/v1/namespaces/team/configmaps/chat-00000000-0", "", False),
        ("/apis/ray.io/v1/namespaces/team/rayclusters/chat-00000000-0", "uid-cluster", True),
    ]
    assert kinds(found)[-1] == "RayCluster"


def test_a_name_that_is_taken_is_not_given():
    found = turn(ONE, taken=frozenset({f"chat-{revision(ONE)}-0", f"chat-{revision(ONE)}-2"}))
    two = turn(make_resolved(replicas=2), taken=frozenset({f"chat-{revision(ONE)}-0", f"chat-{revision(ONE)}-2"}))

    assert (made(found), made(two)) == (["-3"], ["-3", "-4"])
    assert found.plan.deletions == ()


def test_fewer_replicas_take_the_least_busy_away_and_its_requests_first():
    two, found_at = make_resolved(replicas=2), {"10.0.0.1"}
    busy = make_reading(make_said(in_flight=5))
    groups = [make_serving(two, number, reading=busy) for number in range(2)] + [make_serving(two, 2)]
    first = turn(two, groups)
    found = turn(two, groups, previous=first.document, endpoints=found_at)
    # The engine has no route any more, and no EndpointSlice lists it.
    groups[2] = make_serving(two, 2, pods=(make_pod("head2"), make_pod("worker2", is_head=False)))
    still_found = turn(two, groups, previous=found.document, endpoints=found_at)
    unfound = turn(two, groups, previous=still_found.document, endpoints=set())
    soon = turn(two, groups, previous=unfound.document, endpoints=set(), clock=CLOCK + timedelta(seconds=1))
    then = turn(two, groups, previous=unfound.document, endpoints=set(), clock=CLOCK + timedelta(seconds=2))

    assert (routes(first), first.document["rollout"]["terminatingEngines"]) == ([], {groups[2].name: ""})
    assert (routes(found), deleted(found)) == ([("head2", False)], [])
    assert still_found.plan.drains == unfound.plan.drains == soon.plan.drains == ()
    assert [(each.replica, each.wanted) for each in then.plan.drains] == [(groups[2].name, True)]
    groups[2] = make_serving(two, 2, pods=groups[2].pods, reading=make_reading(make_said("draining")))
    drained = turn(two, groups, previous=then.document, endpoints=set())
    assert deleted(drained) == [f"{groups[2].name}-admin", groups[2].name, groups[2].name]


def test_fewer_replicas_take_away_one_that_does_not_serve():
    two = make_resolved(replicas=2)
    broken = make_serving(two, 0, reading=make_reading(make_said("starting")))
    groups = [broken, make_serving(two, 1), make_serving(two, 2)]
    first = turn(two, groups)
    found = turn(two, groups, previous=first.document, endpoints=set())

    assert list(first.document["rollout"]["terminatingEngines"]) == [broken.name]
    assert routes(found) == [("head0", False)]
    assert made(found) == []


@pytest.mark.parametrize(("numbers", "wanted"), [((0, 2), "-3"), ((0, 8), "-9"), ((0, 99), "-1"), ((), "-0")])
def test_numbers_go_up_to_99_and_then_continue_from_the_lowest_free(numbers, wanted):
    one_more = make_resolved(replicas=len(numbers) + 1)
    found = turn(one_more, [make_serving(one_more, number) for number in numbers])

    assert made(found) == [wanted]


def test_a_place_whose_cluster_is_gone_gets_another_name_and_leftovers_are_deleted():
    two = make_resolved(replicas=2)
    gone = f"chat-{revision(two)}-0"
    before = turn(two, [make_serving(two, 0), make_serving(two, 1)]).document
    found = turn(two, [make_serving(two, 1)], previous=before, taken=frozenset({gone}))

    assert made(found) == ["-2"]
    assert deleted(found) == [f"{gone}-admin", gone]
    # Until the deletion has succeeded, no status is written. So the next reconcile plans the same deletion.
    assert deleted(turn(two, [make_serving(two, 1), make_serving(two, 2)], previous=before)) == deleted(found)
    later = turn(two, [make_serving(two, 1)], previous=found.document, taken=frozenset({gone}))
    assert (made(later), deleted(later)) == (["-2"], [])


@pytest.mark.parametrize(
    ("head", "said", "wanted"),
    [
        (make_pod(), make_said(), True),
        (make_pod(), make_said("recovering"), True),
        (make_pod(), None, None),
        (make_pod(), make_said("draining"), None),
        (make_pod(route=True), make_said(), None),
        (make_pod(route=True), make_said("recovering"), None),
        (make_pod(route=True), None, None),
        (make_pod(route=True), make_said("draining"), False),
        (make_pod(route=True, engine=restarted(1)), make_said(), False),
        (make_pod(route=True, engine=restarted(1)), None, False),
    ],
)
def test_requests_are_routed_to_engines_that_take_them(head, said, wanted):
    reading = None if said is None else make_reading(said)
    found = turn(None, (make_group(head, reading=reading),))

    assert [route.wanted for route in found.plan.routes] == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    "reading",
    [
        make_reading(make_said("recovering")),
        make_reading(make_said(token_age=20.0)),
        make_reading(make_said(), failing_since=104.0),
    ],
)
def test_an_engine_that_is_not_well_gets_no_requests_while_another_is(reading):
    two = make_resolved(replicas=2)
    ill = make_serving(two, 1, reading=reading)

    assert routes(turn(two, [make_serving(two, 0), ill])) == [("head1", False)]
    assert routes(turn(two, [ill])) == []


def test_requests_go_to_the_well_before_they_leave_the_ill():
    two = make_resolved(replicas=2)
    ill = make_serving(two, 0, reading=make_reading(make_said("recovering")))
    well = make_serving(two, 1, pods=(make_pod("head1"), make_pod("worker1", is_head=False)))

    assert routes(turn(two, [ill, well])) == [("head1", True), ("head0", False)]


def test_pods_on_a_lost_node_are_taken_away_at_once():
    leaving = make_pod("old", is_head=False, node="n2", deletion_grace=30)
    found = turn(ONE, [make_serving(ONE)], terminating_pods=(leaving,), lost_nodes=frozenset({"n2"}))

    assert [(each.path.split("/")[-1], each.uid, each.grace_s) for each in found.plan.deletions] == [
        ("worker0", "uid-worker0", 0),
        ("old", "uid-old", 0),
    ]


def test_the_pods_of_an_engine_whose_head_is_lost_are_kept_until_their_cluster_is_deleted():
    # If the operator deleted these pods, KubeRay would replace them. The pods are not ready, because their nodes are
    # not ready.
    pods = (make_pod("head0", ready=False), make_pod("worker0", is_head=False, node="n2", ready=False))
    found = turn(ONE, [make_serving(ONE, pods=pods)], lost_nodes=frozenset({"n1", "n2"}))

    assert found.plan.deletions == ()
    assert found.document["groups"][0]["reason"] == "NodeLost"


def test_a_service_whose_spec_cannot_be_used_still_loses_pods_on_lost_nodes():
    found = turn(None, [make_serving(ONE)], lost_nodes=frozenset({"n2"}))

    assert deleted(found) == ["worker0"]


def test_running_engines_are_not_restarted_by_a_change_of_replicas():
    found = turn(make_resolved(replicas=2), [make_serving(ONE)])

    assert (made(found), found.plan.deletions) == (["-1"], ())


def test_an_engine_that_cannot_use_its_settings_is_left_to_its_kubelet():
    group = make_serving(ONE, pods=(make_pod(engine=crashed(78, "no model") | {"restartCount": 9}),), reading=None)
    first = turn(ONE, [group])

    assert turn(ONE, [group], previous=first.document).plan.deletions == ()


def test_a_held_budget_counts_every_pod_that_there_is():
    # This engine has a head and three workers. It is of an old revision, whose spec is unknown.
    other = make_group(make_pod(), *(make_pod(f"w{each}", is_head=False) for each in range(3)), name="chat-00000001-0")
    found = turn(ONE, [make_serving(ONE), other])
    (budget,) = [each for each in found.plan.wanted if each["kind"] == "PodDisruptionBudget"]

    assert (found.step.holds_evictions, budget["spec"]["minAvailable"]) == (True, 8)


def test_evictions_are_held_no_longer_while_nothing_can_be_planned():
    service, rollout = make_service(replicas=2), RolloutState(update_revision="a")
    for seen, budgets in ((Observed(replicas=(make_serving(ONE),)), [1]), (Observed(), [])):
        planned = plan(make_situation(observed=seen, rollout=rollout, service=service, now=Now(CLOCK, 0.0)))
        assert [each["spec"]["minAvailable"] for each in planned.wanted] == budgets


def test_the_last_engine_with_a_route_keeps_it_beside_one_that_is_to_go():
    leaver = make_serving(ONE, 1, pods=(make_pod("head1"), make_pod("worker1", is_head=False)))
    ill = make_serving(ONE, 0, reading=make_reading(make_said("recovering")))
    # With maxUnavailable 0, the planner would take the terminating engine back, because too few engines serve.
    one = make_resolved(rollout={"maxUnavailable": 1})
    rollout = replace(settled(one), terminating={leaver.name: ""}, has_served=True)
    previous = {"rollout": RolloutStatus.of(rollout).model_dump(mode="json", by_alias=True)}
    written = turn(one, [ill, leaver], previous=previous, endpoints=set())
    acted = turn(one, [ill, leaver], previous=written.document, endpoints=set())

    assert acted.step.state == written.step.state
    assert acted.step.state.terminating.keys() == {leaver.name}
    assert routes(written) == routes(acted) == []


def test_no_route_changes_before_the_next_rollout_state_is_written():
    # The planner takes the last engine back, because too few engines serve. Until this new state is written, the engine
    # counts as terminating.
    group = make_serving(ONE, pods=(make_pod("head0"), make_pod("worker0", is_head=False)))
    rollout = replace(settled(ONE), terminating={group.name: ""}, has_served=True)
    previous = {"rollout": RolloutStatus.of(rollout).model_dump(mode="json", by_alias=True)}
    ill = replace(group, reading=make_reading(make_said("recovering")))
    written = turn(ONE, [ill], previous=previous, endpoints=set())
    acted = turn(ONE, [ill], previous=written.document, endpoints=set())

    assert (written.step.is_stored, acted.step.is_stored) == (False, True)
    assert written.step.state.terminating == {}
    assert (routes(written), routes(acted)) == ([], [("head0", True)])


def test_an_engine_that_recovered_takes_requests_while_a_broken_kuberay_keeps_the_rollout_from_its_next_state():
    # The spec was changed while KubeRay was unusable, so the state of the new rollout is not written.
    other = make_resolved(image="rayloom/engine:next")
    recovered = make_serving(ONE, pods=(make_pod("head0"), make_pod("worker0", is_head=False)))
    rollout = replace(settled(ONE), has_served=True)
    previous = {"rollout": RolloutStatus.of(rollout).model_dump(mode="json", by_alias=True)}
    situation = turn(other, [recovered], previous=previous, old=(ONE,)).situation

    assert not situation.step.is_stored
    broken = plan(replace(situation, kuberay_problem="The cluster's KubeRay is too old."))
    assert [(route.pod.name, route.wanted) for route in broken.routes] == [("head0", True)]
    assert plan(situation).routes == ()


def test_a_place_that_waits_for_its_engine_stays_in_the_status_while_the_next_rollout_state_is_written():
    serving = make_serving(ONE)
    before = turn(make_resolved(replicas=2), [serving])
    written = turn(make_resolved(replicas=3), [serving], previous=before.document)
    acted = turn(make_resolved(replicas=3), [serving], previous=written.document)

    def places(found):
        return [each["name"].rpartition("-")[2] for each in found.document["groups"]]

    assert (before.step.is_stored, written.step.is_stored, acted.step.is_stored) == (True, False, True)
    assert (places(before), places(written), places(acted)) == (["0", "1"], ["0", "1"], ["0", "1", "2"])
    assert (made(before), made(written), made(acted)) == (["-1"], [], ["-1", "-2"])


def about_to_complete(resolved):
    """The status of a rollout from the revision "0a0a0a0a", just before it is known that its last engine serves."""
    update = revision(resolved)
    document = turn(resolved, [make_serving(resolved)]).document
    rollout = document["rollout"] | {"currentRevision": "0a0a0a0a", "analysisPassed": True, "step": "Promoting"}
    return document | {"currentRevision": "0a0a0a0a", "updateRevision": update, "rollout": rollout}


def test_the_old_revisions_spec_is_deleted_only_once_the_status_shows_that_its_rollout_is_complete():
    one = [make_serving(ONE)]
    completed = turn(ONE, one, previous=about_to_complete(ONE))
    assert (completed.document["currentRevision"], deleted(completed)) == (revision(ONE), [])
    # If that status was not written, and the only engine fails, the old revision's spec is still there.
    assert deleted(turn(ONE, [], previous=about_to_complete(ONE))) == []
    following = turn(ONE, one, previous=completed.document)
    assert deleted(following) == ["chat-0a0a0a0a"]
    last = turn(ONE, one, previous=following.document)
    assert (deleted(last), last.document["rollout"]) == ([], following.document["rollout"])
    assert "retiredRevisions" not in last.document["rollout"]


def test_the_old_revisions_spec_stays_if_the_spec_has_gone_back_to_it_at_once():
    completed = turn(ONE, [make_serving(ONE)], previous=about_to_complete(ONE))
    found = turn(make_resolved(), [make_serving(ONE)], previous=completed.document, own="0a0a0a0a", old=[ONE])
    assert (found.document["updateRevision"], deleted(found)) == ("0a0a0a0a", [])


def test_while_no_engine_can_be_created_the_note_of_an_unused_spec_stays_and_no_reconcile_deletes_the_spec():
    one = [make_serving(ONE)]
    completed = turn(ONE, one, previous=about_to_complete(ONE))
    following = turn(ONE, one, previous=completed.document)
    broken = replace(following.situation, kuberay_problem="KubeRay is not installed")
    # The status keeps the stored state of the rollout, so a deletion would be sent again in every reconcile.
    assert status(broken).rollout.retired_revisions == ["0a0a0a0a"]
    assert (plan(broken).deletions, deleted(following)) == ((), ["chat-0a0a0a0a"])
