"""The engines that are recreated, the times of these recoveries, and the records of recoveries in the status.

The default limits: hang 10 s, rebuild 600 s, node loss 15 s, 5 restarts, back-off 10 s to 300 s.
"""

from datetime import timedelta

import pytest

from rayloom_operator.api.spec import Recovery
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.recovery import back_off_seconds, cause_to_replace
from rayloom_operator.times import Now
from rt_operator import (
    CLOCK,
    NOW,
    conditions,
    crashed,
    make_group,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    restarted,
    turn,
    waiting,
)

ONE = make_resolved()
TWO = make_resolved(replicas=2)
UNREADY = {"ready": False, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
# A container that has ended several times over years. The kubelet restarts such a container at once.
ENDED = {"ready": False, "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
YOUNG = "2026-01-02T03:00:00Z"  # 245 s before the test's clock
UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]


def gave_up(times=0):
    return crashed(70, "ranks died") | {"restartCount": times}


def worker(**kwargs):
    return make_pod("worker", is_head=False, **kwargs)


def silent(seconds, said=None, **kwargs):
    return make_reading(said, failing_since=NOW - seconds, error="no answer", **kwargs)


def stuck(state="starting", seconds=631.0):
    return make_reading(make_said(state, None), at=NOW, advanced_at=NOW - seconds)


def cause(*pods, reading=None, lost=(), **facts):
    found = cause_to_replace(make_group(*pods, reading=reading, **facts), ONE, frozenset(lost), now=Now(CLOCK, NOW))
    return found and found.reason


@pytest.mark.parametrize(
    ("pods", "facts", "reason"),
    [
        # The head pod is lost, or is on a lost node.
        ((worker(),), {"is_headless": True}, Reason.HEAD_LOST),
        ((), {"is_headless": True}, Reason.HEAD_LOST),
        ((make_pod(), worker()), {"lost": ["n1"], "reading": make_reading(make_said("recovering"))}, Reason.NODE_LOST),
        # The engine gave up, or a container of the head keeps ending.
        ((make_pod(engine=gave_up()),), {}, Reason.ENGINE_FAILED),
        ((make_pod(engine=crashed(1, "boom") | {"restartCount": 3}),), {}, Reason.ENGINE_FAILED),
        # The engine has answered earlier. Now the operator gets no answer, and the kubelet's probe of the engine fails,
        # too.
        ((make_pod(engine=UNREADY),), {"reading": silent(20, make_said())}, Reason.ENGINE_UNREACHABLE),
        # The engine reports a start or a recovery without progress.
        ((make_pod(), worker()), {"reading": stuck()}, Reason.ENGINE_STUCK),
        ((make_pod(), worker()), {"reading": stuck("recovering")}, Reason.ENGINE_STUCK),
        ((make_pod(engine=UNREADY), worker()), {"reading": silent(631, advanced_at=-521)}, Reason.ENGINE_STUCK),
        # KubeRay has created 10 pods, and 9 are allowed: twice the 2 pods, plus the restart budget of 5.
        ((make_pod(), worker()), {"num_new_pods": 10}, Reason.CONTAINER_FAILED),
    ],
)
def test_a_failure_that_nothing_else_repairs_recreates_the_engine(pods, facts, reason):
    assert cause(*pods, **facts) is reason


@pytest.mark.parametrize(
    ("pods", "facts"),
    [
        # KubeRay creates pods: the first pods, and later pods of workers.
        ((), {}),
        ((worker(),), {}),
        ((make_pod(), worker()), {"reading": make_reading(make_said()), "lost": ["n9"]}),
        ((make_pod(), worker(node="n2")), {"reading": make_reading(make_said("recovering")), "lost": ["n2"]}),
        ((make_pod(), worker(phase="Failed")), {"num_new_pods": 9, "reading": make_reading(make_said("recovering"))}),
        # Kubelets restart containers.
        ((make_pod(engine=crashed(1) | {"restartCount": 2}),), {}),
        ((make_pod(engine=restarted(70)),), {}),
        ((make_pod(engine=ENDED | {"restartCount": 9}),), {}),
        ((make_pod(), worker(engine=crashed(1) | {"restartCount": 9})), {}),
        # A model, image, node or folder is missing. A new engine would not have it either.
        ((make_pod(engine=crashed(78, "no model") | {"restartCount": 9}),), {}),
        ((make_pod(engine=waiting("ImagePullBackOff")),), {"reading": stuck()}),
        ((make_pod(), worker(node="", conditions=UNSCHEDULABLE, engine=waiting(""))), {"reading": stuck()}),
        ((make_pod(mount_failure="/x is not a directory"),), {}),
        # The engine replaces its ranks and processes, and has time for this.
        ((make_pod(), worker()), {"reading": make_reading(make_said("recovering"))}),
        ((make_pod(), worker()), {"reading": stuck(seconds=629.0)}),
        ((make_pod(), worker(started=YOUNG)), {"reading": stuck()}),
        ((make_pod(engine=UNREADY),), {"reading": silent(19.9, make_said())}),
        ((make_pod(engine=UNREADY),), {"reading": silent(100.0)}),
        ((make_pod(engine=UNREADY),), {"reading": silent(100.0, make_said("starting", None))}),
        # The kubelet reaches the engine. Only the operator does not reach it, because of a firewall or another key.
        ((make_pod(),), {"reading": silent(9999, make_said(), advanced_at=-9999)}),
        # The engine was asked to drain.
        ((make_pod(), worker()), {"reading": stuck("draining")}),
        # The engine serves, however long it has made no progress.
        ((make_pod(), worker()), {"reading": make_reading(make_said(), at=NOW, advanced_at=-9999)}),
        ((make_pod(), worker()), {"reading": make_reading(make_said()), "num_new_pods": 99}),
    ],
)
def test_one_healer_for_each_fault(pods, facts):
    assert cause(*pods, **facts) is None


def test_an_engine_that_serves_is_left_alone_however_many_pods_were_made():
    first = turn(ONE, [make_serving(ONE, num_new_pods=99)])
    second = turn(ONE, [make_serving(ONE, num_new_pods=99)], previous=first.document)

    assert conditions(first.document)["Degraded"] == ("False", "Healthy")
    assert (second.document, second.plan.deletions) == (first.document, ())


def hung(seconds, said=None, started="2026-01-01T00:00:00Z"):
    engine = {"ready": False, "state": {"running": {"startedAt": started}}}
    pods = (make_pod(route=True, engine=engine), worker())
    return make_serving(ONE, pods=pods, reading=silent(seconds, said))


def test_a_new_operator_reads_from_the_status_that_a_silent_engine_had_served():
    serving = turn(ONE, [make_serving(ONE)])
    # Twice the hang limit of 10 s passes under each of two operators. Neither operator gets an answer from the engine.
    for seconds in (0, 19.9, 0, 19.9):
        serving = turn(ONE, [hung(seconds)], previous=serving.document)
        assert (serving.status.groups[0].state, serving.status.groups[0].restarts) == ("Recovering", 0)
    found = turn(ONE, [hung(20)], previous=serving.document).status.groups[0]

    assert (found.state, found.reason, found.restarts) == ("Failed", "EngineUnreachable", 1)


@pytest.mark.parametrize(
    ("before", "started"),
    [
        (make_serving(ONE, reading=make_reading(make_said("starting", None))), "2026-01-01T00:00:00Z"),
        # The engine's containers were started after it served.
        (make_serving(ONE), "2026-01-02T03:04:06Z"),
    ],
)
def test_an_engine_that_was_never_seen_serving_has_all_its_time_to_start(before, started):
    found = turn(ONE, [hung(100, started=started)], previous=turn(ONE, [before]).document).status.groups[0]

    assert (found.state, found.restarts) == ("Starting", 0)


def test_an_engine_that_never_left_its_start_is_not_said_to_recover():
    found = turn(ONE, [hung(100, make_said("starting", None))]).status.groups[0]

    assert (found.state, found.reason) == ("Failed", "EngineUnreachable")


def test_the_last_lines_of_an_ended_container_are_kept():
    group = make_serving(ONE, pods=(make_pod(engine=gave_up()),), reading=None)
    (found,) = turn(ONE, [group]).status.groups

    assert (found.state, found.reason, found.restarts) == ("Failed", "EngineFailed", 1)
    assert found.failure.message == "The engine gave up: ranks died"
    assert found.failure.time == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(("restarts", "seconds"), [(1, 0), (2, 10), (3, 20), (4, 40), (5, 80), (6, 300), (2000, 300)])
def test_the_first_time_is_at_once_and_each_further_one_later(restarts, seconds):
    assert back_off_seconds(restarts, Recovery()) == seconds


def test_a_back_off_is_never_longer_than_its_maximum():
    patient = Recovery(restartBudget=1000, backoffBaseSeconds=7, backoffMaxSeconds=60)

    assert [back_off_seconds(restarts, patient) for restarts in (2, 5, 6, 900)] == [7, 56, 60, 60]
    assert back_off_seconds(1, Recovery(restartBudget=0)) == 300


def failing(uid, resolved=ONE):
    return make_serving(resolved, uid=uid, pods=(make_pod(engine=gave_up()),), reading=None)


def test_a_failure_is_written_down_before_it_is_acted_on_and_counted_once():
    first = turn(ONE, [failing("a")])
    second = turn(ONE, [failing("a")], previous=first.document, clock=CLOCK + timedelta(minutes=5))

    assert first.plan.deletions == ()
    (cluster,) = second.plan.deletions
    assert (cluster.uid, cluster.is_foreground) == ("a", True)
    assert second.document["groups"][0]["failure"] == first.document["groups"][0]["failure"]
    assert second.document["groups"][0]["restarts"] == 1


def test_an_engine_is_recreated_under_another_name_at_its_retry_time():
    second = turn(ONE, [failing("b")], previous=turn(ONE, [failing("a")]).document)
    name = second.status.groups[0].name
    ending = turn(ONE, previous=second.document, taken=frozenset({name}))
    name = f"{name[:-1]}1"
    early = turn(ONE, previous=ending.document, clock=CLOCK + timedelta(seconds=9))
    due = turn(ONE, previous=early.document, clock=CLOCK + timedelta(seconds=10))

    assert second.document["groups"][0]["restarts"] == 2
    for found in (ending, early):
        assert "RayCluster" not in [each["kind"] for each in found.plan.wanted]
        assert CLOCK + timedelta(seconds=10) in found.plan.waits
        (group,) = found.document["groups"]
        assert (group["name"], group["state"]) == (name, "BackOff")
        assert group["nextRetryTime"] == "2026-01-02T03:04:15Z"
        assert conditions(found.document)["Degraded"] == ("True", "GroupBackOff")
        assert conditions(found.document)["Available"] == ("False", "GroupBackOff")
    assert "ranks died" in early.status.conditions[4].message
    assert "RayCluster" in [each["kind"] for each in due.plan.wanted]
    assert (due.plan.waits, due.plan.new) == ((), frozenset({name}))
    assert "nextRetryTime" not in due.document["groups"][0]
    assert conditions(due.document)["Degraded"] == ("True", "Recovering")


def test_a_successor_is_made_only_when_its_failures_are_remembered_under_its_name():
    second = turn(ONE, [failing("a")], previous=turn(ONE, [failing("a")]).document)
    taken = frozenset({second.status.groups[0].name})
    third = turn(ONE, previous=second.document, taken=taken)
    fourth = turn(ONE, previous=third.document, taken=taken)

    assert "RayCluster" not in [each["kind"] for each in third.plan.wanted]
    assert third.plan.waits == (CLOCK,)
    assert third.document["groups"][0]["restarts"] == 1
    assert "RayCluster" in [each["kind"] for each in fourth.plan.wanted]
    assert fourth.document["groups"][0]["name"] == third.document["groups"][0]["name"] == f"{min(taken)[:-1]}1"


def test_a_cache_that_lags_does_not_bring_back_an_engine_that_has_a_successor():
    second = turn(ONE, [failing("a")], previous=turn(ONE, [failing("a")]).document)
    third = turn(ONE, previous=second.document, taken=frozenset({second.status.groups[0].name}))
    late = turn(ONE, [failing("a")], previous=third.document)

    assert [slot.name[-2:] for slot in late.slots] == ["-1"]
    assert {each["name"][-2:]: each["restarts"] for each in late.document["groups"]} == {"-0": 0, "-1": 1}


def test_an_engine_whose_head_was_evicted_is_recreated_without_a_restart():
    def told(**facts):
        worker = make_pod("worker", is_head=False)
        return make_serving(ONE, uid="a", pods=(worker,), reading=None, is_head_evicted=True, **facts)

    draining = turn(ONE, [told()])
    gone = turn(ONE, [told(is_headless=True)], previous=draining.document)
    second = turn(ONE, [told(is_headless=True)], previous=gone.document)

    assert conditions(draining.document)["Available"] == ("False", "Draining")
    assert (gone.document["groups"][0]["restarts"], gone.document["groups"][0]["failure"]["reason"]) == (0, "HeadLost")
    assert [each.uid for each in second.plan.deletions] == ["a"]
    # The next engine is created at once. When this engine serves, the record of the failure is dropped.
    name = second.status.groups[0].name
    third = turn(ONE, previous=second.document, taken=frozenset({name}))
    fourth = turn(ONE, previous=third.document, taken=frozenset({name}))
    assert "RayCluster" in [each["kind"] for each in fourth.plan.wanted]
    fifth = turn(ONE, [make_serving(ONE, 1, uid="b")], previous=fourth.document)
    assert "failure" not in fifth.document["groups"][0]


def on_lost_node(number, state, **facts):
    """An engine that answered with this state for the last time 40 s ago, before its head's node was lost."""
    return make_serving(ONE, number, uid=f"u{number}", reading=silent(40, make_said(state)), **facts)


def test_lost_nodes_never_delay_the_replacement_of_an_engine_that_has_served():
    document = turn(ONE, [make_serving(ONE, uid="u0")]).document
    for number in range(8):
        gone = turn(ONE, [on_lost_node(number, "serving")], previous=document, lost_nodes=frozenset({"n1"}))
        (group,) = gone.document["groups"]
        assert (group["failure"]["reason"], group["restarts"]) == ("NodeLost", 0)
        removed = turn(ONE, [on_lost_node(number, "serving")], previous=gone.document, lost_nodes=frozenset({"n1"}))
        assert [each.uid for each in removed.plan.deletions] == [f"u{number}"]
        taken = frozenset({group["name"]})
        renamed = turn(ONE, previous=removed.document, taken=taken)
        empty = turn(ONE, previous=renamed.document, taken=taken)
        assert "RayCluster" in [each["kind"] for each in empty.plan.wanted], "created without a back-off"
        document = turn(ONE, [make_serving(ONE, number + 1, uid=f"u{number + 1}")], previous=empty.document).document
        assert "failure" not in document["groups"][0]


def test_nodes_lost_during_the_start_of_an_engine_count_because_the_start_may_have_caused_it():
    starting = turn(ONE, [make_serving(ONE, uid="u0", reading=make_reading(make_said("starting", None)))])
    lost = turn(ONE, [on_lost_node(0, "starting")], previous=starting.document, lost_nodes=frozenset({"n1"}))

    assert (lost.document["groups"][0]["failure"]["reason"], lost.document["groups"][0]["restarts"]) == ("NodeLost", 1)


def test_an_engine_that_gave_up_beside_a_pod_that_lacked_memory_has_that_reason():
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    worker = make_pod("worker", is_head=False, engine={"state": {"running": {}}, "lastState": ended})
    (head,) = failing("a").pods
    found = turn(ONE, [make_serving(ONE, uid="a", pods=(head, worker), reading=None)])

    message = found.document["groups"][0]["failure"]["message"]
    assert "ranks died" in message and "Memory was too little in worker" in message


def test_the_cause_that_was_first_stays():
    first = turn(ONE, [failing("a")])
    second = turn(ONE, [make_serving(ONE, uid="b", is_headless=True, pods=())], previous=first.document)

    assert second.document["groups"][0]["failure"]["reason"] == "EngineFailed"
    assert second.document["groups"][0]["failure"]["uid"] == "b"


def test_a_recreated_engine_is_degraded_until_it_serves():
    first = turn(ONE, [failing("a")])
    starting = make_serving(ONE, uid="b", reading=make_reading(make_said("starting", None)))
    second = turn(ONE, [starting], previous=first.document)
    third = turn(ONE, [make_serving(ONE, uid="b")], previous=second.document)

    assert conditions(second.document)["Degraded"] == ("True", "Recovering")
    assert conditions(second.document)["Available"] == ("False", "Starting")
    assert conditions(third.document)["Degraded"] == ("False", "Healthy")
    assert third.document["groups"][0]["restarts"] == 1


def test_ten_minutes_of_service_are_a_clean_record_and_less_are_not():
    failed = turn(ONE, [failing("a")])
    serving = turn(ONE, [make_serving(ONE, uid="b")], previous=failed.document)
    for seconds, restarts in ((600, 1), (601, 0)):
        later = CLOCK + timedelta(seconds=seconds)
        found = turn(ONE, [make_serving(ONE, uid="b")], previous=serving.document, clock=later)
        assert found.document["groups"][0]["restarts"] == restarts
        assert ("failure" in found.document["groups"][0]) == bool(restarts)


def test_an_engine_that_came_back_before_anything_was_done_lives_on():
    failed = turn(ONE, [failing("a")])
    back = turn(ONE, [make_serving(ONE, uid="a")], previous=failed.document)

    assert back.plan.deletions == ()
    assert back.document["groups"][0]["restarts"] == 0


def test_a_failure_of_one_engine_is_not_made_up_for_by_another():
    broken = make_serving(TWO, 0, uid="a", is_headless=True, pods=())
    failed = turn(TWO, [broken, make_serving(TWO, 1)], previous=turn(TWO, [failing("z", TWO)]).document)
    held = turn(TWO, [make_serving(TWO, 1)], previous=failed.document)

    assert [slot.name[-2:] for slot in held.slots] == ["-0", "-1"]
    assert "RayCluster" not in [each["kind"] for each in held.plan.wanted]
    assert (held.status.ready, held.status.groups[0].state) == ("1/2", "BackOff")


def test_a_smaller_service_gives_up_the_place_that_waits():
    failed = turn(TWO, [make_serving(TWO, 0, uid="a", is_headless=True, pods=()), make_serving(TWO, 1)])
    one = turn(ONE, [make_serving(TWO, 1)], previous=failed.document)

    assert [slot.name[-2:] for slot in one.slots] == ["-1"]
    assert [each.path.rpartition("-0")[2] for each in one.plan.deletions] == ["-admin", ""], "what was left of it"


def test_the_pods_of_an_engine_beyond_help_do_not_drain():
    failed = turn(ONE, [failing("a")])
    pods = [make_pod("head", owner="a", deletion_grace=45), make_pod("other", owner="b", deletion_grace=45)]
    name = failed.status.groups[0].name
    found = turn(ONE, previous=failed.document, taken=frozenset({name}), terminating_pods=tuple(pods))

    assert [(each.uid, each.grace_s) for each in found.plan.deletions if each.uid] == [("uid-head", 1)]
    hurried = (make_pod("head", owner="a", deletion_grace=1),)
    assert turn(ONE, previous=failed.document, terminating_pods=hurried).plan.deletions == ()


def test_another_revision_begins_with_a_clean_record():
    failed, other = turn(ONE, [failing("a")]), make_resolved(engine={"args": {"maxNumSeqs": 9}})
    decided = turn(other, [failing("a")], previous=failed.document)
    retired = turn(other, [failing("a")], previous=decided.document)  # the stored spec of the old revision is deleted
    changed = turn(other, [failing("a")], previous=retired.document)

    assert changed.slots[0].restarts == 0
    assert "RayCluster" in [each["kind"] for each in changed.plan.wanted]
