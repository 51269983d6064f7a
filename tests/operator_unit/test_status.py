"""The status of a service: its conditions, its numbers, its groups, and the Events about it."""

from datetime import datetime, timedelta

import pytest

from rayloom_operator.api.status import FAULTS, Condition, Reason
from rayloom_operator.decide.events import events
from rayloom_operator.decide.recovery import remembered
from rt_operator import (
    CLOCK,
    conditions,
    crashed,
    make_group,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    turn,
)

ONE = make_resolved()
TWO = make_resolved(replicas=2)
UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes: cpu."},
]
SERVICE = {
    "apiVersion": "rayloom.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": "team", "uid": "u"},
}


def test_a_serving_service_in_full():
    resolved = make_resolved(parallelism={"pipeline": 2})
    pods = (make_pod("head", route=True), *(make_pod(name, is_head=False) for name in ("w0", "w1")))
    found = turn(resolved, [make_serving(resolved, pods=pods)])
    status = found.status

    assert (status.shape, status.ready, status.endpoint) == ("TP1xPP2", "1/1", "http://chat.team.svc:8000")
    assert (status.replicas, status.ready_replicas, status.available_replicas, status.updated_replicas) == (1, 1, 1, 1)
    assert status.selector == "rayloom.dev/service=chat,ray.io/node-type=head"
    assert status.observed_generation == 3
    assert conditions(found.document) == {
        "Accepted": ("True", "Valid"),
        "ModelReady": ("True", "Loaded"),
        "Scheduled": ("True", "Scheduled"),
        "Available": ("True", "Serving"),
        "Degraded": ("False", "Healthy"),
        "Progressing": ("False", "Complete"),
        "RolledBack": ("False", "NotRolledBack"),
        "Paused": ("False", "NotPaused"),
    }
    (group,) = status.groups
    assert (group.state, group.nodes, group.restarts, group.failure) == ("Serving", ("n1", "n2"), 0, None)
    assert group.name == f"chat-{status.current_revision}-0"


def test_equal_facts_give_equal_bytes_and_a_time_moves_only_with_its_field():
    first = turn(TWO, [make_serving(TWO)]).document
    later = CLOCK + timedelta(hours=1)

    assert turn(TWO, [make_serving(TWO)], previous=first, clock=later).document == first
    changed = turn(TWO, [make_serving(TWO, reading=None)], previous=first, clock=later).document
    moved = {each["type"] for each in changed["conditions"] if "04:04:05" in each["lastTransitionTime"]}
    assert moved == {"ModelReady", "Available"}
    assert "04:04:05" in changed["groups"][0]["lastTransitionTime"]


def test_one_engine_of_two_that_serves_is_enough_to_be_available():
    broken = make_serving(TWO, 1, pods=(make_pod("head1", engine=crashed(78, "no model")),), reading=None)
    found = turn(TWO, [make_serving(TWO), broken])

    assert (found.status.ready, found.status.replicas, found.status.ready_replicas) == ("1/2", 2, 1)
    said = conditions(found.document)
    assert (said["Available"], said["ModelReady"]) == (("True", "Serving"), ("True", "Loaded"))
    assert said["Degraded"] == ("True", "ModelNotFound")
    assert found.status.conditions[4].message == f"{broken.name}: no model"


def test_a_starting_engine_outranks_a_failed_one():
    broken = make_serving(TWO, 0, pods=(make_pod("head0", engine=crashed(78, "no model")),), reading=None)
    starting = make_serving(TWO, 1, reading=make_reading(make_said("starting", None)))
    said = conditions(turn(TWO, [broken, starting]).document)

    assert (said["Available"], said["Degraded"]) == (("False", "Starting"), ("True", "ModelNotFound"))


@pytest.mark.parametrize(
    ("group", "degraded"),
    [
        (make_serving(ONE, reading=make_reading(make_said("starting", None))), ("False", "Starting")),
        (make_serving(ONE, pods=()), ("False", "PodsPending")),
        (make_serving(ONE, reading=make_reading(make_said("recovering"))), ("True", "Recovering")),
        (make_serving(ONE, reading=make_reading(make_said(token_age=20.0))), ("True", "TokensStopped")),
        (make_serving(ONE, reading=make_reading(make_said("draining"))), ("False", "Draining")),
    ],
)
def test_a_start_is_no_degradation_and_a_recovery_is(group, degraded):
    assert conditions(turn(ONE, [group]).document)["Degraded"] == degraded


def test_pods_without_a_node_are_reported():
    head, worker = make_pod("head"), make_pod("worker", is_head=False, node="", conditions=UNSCHEDULABLE)
    stuck = turn(ONE, [make_serving(ONE, pods=(head, worker), reading=None)])
    waiting = turn(ONE, [make_serving(ONE, pods=(head,), reading=None)])

    assert conditions(stuck.document)["Scheduled"] == ("False", "Unschedulable")
    assert conditions(waiting.document)["Scheduled"] == ("False", "PodsPending")
    assert waiting.status.conditions[2].message.startswith("1 of 2 pods of chat-")


@pytest.mark.parametrize(("before", "after", "num_pods"), [(1, 2, 2), (2, 1, 3)])
def test_engines_of_each_revision_need_as_many_nodes_as_their_own_spec_has_pods(before, after, num_pods):
    old, new = (make_resolved(parallelism={"pipeline": stages}) for stages in (before, after))
    pods = (make_pod("head", route=True), *(make_pod(f"w{each}", is_head=False) for each in range(num_pods - 1)))
    serving = turn(old, [make_serving(old, pods=pods)]).document

    whole = turn(new, [make_serving(old, pods=pods)], previous=serving, old=(old,))
    lacking = turn(new, [make_serving(old, pods=pods[:-1])], previous=serving, old=(old,))

    assert conditions(whole.document)["Scheduled"] == ("True", "Scheduled")
    assert conditions(lacking.document)["Scheduled"] == ("False", "PodsPending")
    assert f"{num_pods - 1} of {num_pods} pods of " in lacking.status.conditions[2].message


def test_a_lost_node_is_named():
    found = turn(TWO, [make_serving(TWO), make_serving(TWO, 1)], lost_nodes=frozenset({"n2", "n9"}))

    assert conditions(found.document)["Degraded"] == ("True", "NodeLost")
    assert found.status.conditions[4].message.startswith("Node n2 not ready")


def test_an_unusable_spec_is_refused_and_leaves_running_engines_alone():
    groups = [make_serving(TWO), make_serving(TWO, 1)]
    previous = turn(TWO, groups).document
    found = turn(None, groups, problems=("spec.replicas: no", "spec.model: no"), previous=previous)

    assert found.status.conditions[0].message == "spec.replicas: no; spec.model: no"
    assert [each.status for each in found.status.conditions[:5]] == ["False", "True", "True", "True", "False"]
    assert (found.status.endpoint, found.status.ready) == ("http://chat.team.svc:8000", "2/2")
    assert (found.status.update_revision, found.status.updated_replicas) == (previous["updateRevision"], 2)
    assert (found.plan.wanted, found.plan.deletions) == ((), ())


def test_an_unusable_spec_without_engines_is_in_every_condition():
    found = turn(None, problems=("spec.replicas: no",))

    assert conditions(found.document) == {
        "Accepted": ("False", "InvalidSpec"),
        "ModelReady": ("False", "Loading"),
        "Scheduled": ("False", "InvalidSpec"),
        "Available": ("False", "InvalidSpec"),
        "Degraded": ("False", "InvalidSpec"),
        "Progressing": ("False", "InvalidSpec"),
        "RolledBack": ("False", "NotRolledBack"),
        "Paused": ("False", "NotPaused"),
    }


def test_pods_that_are_not_there_have_no_node():
    previous = turn(ONE, [make_serving(ONE)]).document
    for pods, message in (((), " has no pods."), ((make_pod(node=""),), "0 of 1 pods of ")):
        found = turn(None, [make_serving(ONE, pods=pods)], problems=("spec.model: no",), previous=previous)
        assert conditions(found.document)["Scheduled"] == ("False", "PodsPending")
        assert message in found.status.conditions[2].message


def test_a_refusal_of_the_api_server_is_in_the_condition():
    said = turn(ONE, refusal="quota").status.conditions

    assert (said[0].reason, said[0].status) == (Reason.APPLY_REFUSED, "False")
    assert (said[3].reason, said[3].message) == (Reason.APPLY_REFUSED, "quota")


def test_running_engines_are_judged_while_their_successor_is_refused():
    previous = turn(ONE, [make_serving(ONE)]).document
    changed = make_resolved(engine={"args": {"maxNumSeqs": 9}})
    found = turn(changed, [make_serving(ONE)], previous=previous, refusal="quota")

    assert [each.reason for each in found.status.conditions] == [
        Reason.APPLY_REFUSED,
        Reason.LOADED,
        Reason.SCHEDULED,
        Reason.SERVING,
        Reason.HEALTHY,
        Reason.STARTING,
        Reason.NOT_ROLLED_BACK,
        Reason.NOT_PAUSED,
    ]
    assert (found.status.current_revision, found.status.ready) == (previous["currentRevision"], "1/1")
    assert found.status.updated_replicas == 0


def test_events_name_the_change_and_are_equal_when_repeated():
    broken = make_serving(ONE, pods=(make_pod(engine=crashed(78, "no model")),), reading=None)
    found = turn(ONE, [broken])
    written = SERVICE | {"status": found.document}

    (event,) = events(SERVICE, found.status, CLOCK)
    (again,) = events(SERVICE, found.status, CLOCK)
    assert (event["type"], event["reason"], event["note"]) == ("Warning", "ModelNotFound", "no model")
    assert event["metadata"]["name"] == again["metadata"]["name"]
    assert events(written, found.status, CLOCK) == ()


def test_a_note_has_no_more_bytes_than_the_api_server_takes():
    words = "größer " * 300  # 1024 characters of this text have more than 1024 bytes
    broken = make_serving(ONE, pods=(make_pod(engine=crashed(78, words)),), reading=None)
    found = turn(ONE, [broken])
    (event,) = events(SERVICE, found.status.model_copy(update={"conditions": long(found.status, words)}), CLOCK)

    assert len(event["note"].encode()) <= 1024
    assert event["note"].startswith("größer größer") and event["note"].endswith("...")


def long(said, words):
    return tuple(each.model_copy(update={"message": words}) for each in said.conditions if each.type == "Available")


def test_no_sentence_is_longer_than_the_definition_allows():
    condition = next(each for each in turn(ONE, [make_serving(ONE)]).status.conditions)
    said = condition.model_dump() | {"message": "x" * 2_000_000}

    assert len(Condition.model_validate(said).message) == 4096
    failure = {"uid": "u", "reason": "EngineFailed", "message": "x" * 2_000_000, "time": "2026-01-01T00:00:00Z"}
    # An operator without bounds has written this status. The operator reads it back, and the records of failures stay.
    group = {"name": "g", "revision": "r", "state": "Failed", "reason": "EngineFailed", "restarts": 3}
    group |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "failure": failure, "nodes": ["n"] * 5000}
    read = remembered({"groups": [group]})["g"]
    assert (read.restarts, len(read.failure.message), len(read.nodes)) == (3, 4096, 4096)


def test_a_recovery_is_an_event_and_a_first_healthy_state_is_none():
    sick = turn(TWO, [make_serving(TWO), make_serving(TWO, 1, reading=make_reading(make_said("recovering")))])
    well = turn(TWO, [make_serving(TWO), make_serving(TWO, 1)], previous=sick.document)

    found = events(SERVICE | {"status": sick.document}, well.status, CLOCK)
    assert [(each["type"], each["reason"]) for each in found] == [("Normal", "Healthy"), ("Normal", "Complete")]
    assert [each["reason"] for each in events(SERVICE, well.status, CLOCK)] == ["Serving"]


def test_a_state_that_ends_by_itself_is_no_fault():
    assert not FAULTS & {Reason.SERVING, Reason.STARTING, Reason.HEALTHY, Reason.SCHEDULED, Reason.RECOVERING}
    assert {Reason.GROUP_BACK_OFF, Reason.NODE_LOST, Reason.HEAD_LOST, Reason.ENGINE_STUCK} <= FAULTS


def test_an_engine_that_serves_is_available_whatever_its_revision():
    # The spec was changed and changed back. The first engine failed. The second engine is of the other revision, and
    # serves until it is recreated.
    failed = make_serving(ONE, uid="a", is_headless=True, pods=())
    before = turn(ONE, [failed], previous=turn(ONE, [failed]).document).document
    before["groups"][0]["restarts"] = 2
    second = make_serving(make_resolved(engine={"args": {"maxNumSeqs": 9}}))
    found = turn(ONE, [second], previous=before)

    assert found.plan.deletions == ()
    assert conditions(found.document)["Available"] == ("True", "Serving")
    assert conditions(found.document)["Scheduled"] == ("False", "GroupBackOff")
    assert (found.status.ready, found.status.replicas, found.status.updated_replicas) == ("1/1", 1, 0)


def test_groups_of_an_old_revision_are_listed_and_count_for_nothing():
    found = turn(ONE, [make_group(make_pod()), make_serving(ONE)])

    assert (found.status.replicas, found.status.ready) == (1, "1/1")
    assert sorted(each.name for each in found.status.groups)[0] == "chat-00000000-0"
    assert isinstance(datetime.fromisoformat(found.status.groups[0].last_transition_time), datetime)


def test_no_deadline_counts_and_nothing_is_held_while_nothing_can_be_planned():
    previous = turn(ONE, [make_serving(ONE)]).document
    times = dict.fromkeys(("progressDeadlineStartTime", "evictionHoldStartTime"), "2026-01-02T03:04:05Z")
    previous["rollout"] |= times
    found = turn(None, [make_serving(ONE)], problems=("spec.model: no",), previous=previous).document

    assert found["rollout"].keys() & times.keys() == set()
    assert found["rollout"]["enginesPerRevision"] == previous["rollout"]["enginesPerRevision"]


def test_a_terminating_engine_with_requests_is_draining():
    none = make_resolved(replicas=0)
    unrouted = make_serving(none, pods=(make_pod("head0"), make_pod("worker0", is_head=False)))
    first = turn(none, [unrouted])
    found = turn(none, [unrouted], previous=first.document, endpoints=set())

    assert found.document["groups"][0]["reason"] == "Draining"
    assert conditions(found.document)["Available"] == ("False", "Draining")
    assert conditions(turn(none, previous=found.document).document)["Available"] == ("False", "Suspended")
