"""Rollouts step by step, with numbers that can be checked by hand. test_rollout_machine.py has random rollouts."""

from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import ValidationError

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.counts import revision_counts
from rayloom_operator.decide.rollout.inputs import ReplicaView, View
from rayloom_operator.decide.rollout.planner import next_step
from rt_rolling import BEGIN, CRASHES, FAILS_REQUESTS, NEVER_STARTS, SLOW, Rolling, make_desired


def serving(revision="a", replicas=2, capacity=99, **rollout):
    """Returns a world in which engines of the first revision serve."""
    world = Rolling(make_desired(revision, replicas, **rollout), capacity)
    world.run(20)
    assert (world.stored.step, world.num_available()) == ("Complete", replicas)
    return world


def story(world, seconds):
    """(step, engines by revision, number of serving engines), whenever one of these changes."""
    found = []
    for _ in range(seconds):
        world.run(1)
        line = (world.stored.step, world.revisions(), world.num_available())
        if not found or found[-1] != line:
            found.append(line)
    return found


def acts(world, seconds):
    """All changes in their order."""
    found = []
    for _ in range(seconds):
        world.pass_time(1)
        for _ in range(9):
            again = world.reconcile().requeue_after_s == 0.0
            found += world.acts
            if not again:
                break
    return found


def test_a_rollout_makes_one_more_engine_and_replaces_the_others_one_by_one():
    world = serving(replicas=2)
    world.ask(revision="b")

    assert story(world, 80) == [
        ("Starting", "aab", 2),
        ("Analyzing", "aab", 3),
        ("Promoting", "aab", 2),
        ("Promoting", "ab", 2),
        ("Promoting", "abb", 2),
        ("Promoting", "bb", 2),
        ("Complete", "bb", 2),
    ]


def test_an_engine_loses_its_route_then_its_endpoint_then_drains_and_is_deleted():
    world = serving(replicas=1)
    world.ask(revision="b")

    assert acts(world, 60) == [
        ("make", "b"),
        ("route_on", "b-0"),
        ("route_off", "a-0"),
        ("drain", "a-0"),
        ("delete", "a-0"),
    ]


def test_streams_that_do_not_end_hold_a_drain_for_drain_seconds():
    world = serving(replicas=1)
    world.has_stuck_streams = True
    world.ask(revision="b")
    while ("drain", "a-0") not in world.acts:
        world.run(1)
    began = world.seconds
    while "a" in world.revisions():
        world.run(1)

    assert world.seconds - began in (9, 10, 11)  # drainSeconds is 10, and times are stored to the second


def test_without_surge_an_old_engine_makes_room_on_a_full_cluster():
    world = serving(replicas=2, capacity=2, maxSurge=0, maxUnavailable=1)
    world.ask(revision="b")

    assert story(world, 90) == [
        ("Starting", "aa", 1),
        ("Starting", "a", 1),
        ("Starting", "ab", 1),
        ("Analyzing", "ab", 2),
        ("Promoting", "ab", 1),
        ("Promoting", "b", 1),
        ("Promoting", "bb", 1),
        ("Complete", "bb", 2),
    ]


def test_a_rollout_waits_for_room_in_a_full_cluster_and_fails_no_revision():
    world = serving(replicas=2, capacity=2)
    world.ask(revision="b")
    world.run(500)  # The deadline is 120 s.

    assert (world.stored.step, world.stored.failure) == ("WaitingForCapacity", None)
    assert world.step.message == (
        "Engine b-0 finds no node; engines that serve are left as they are. Add nodes, or roll within the room that "
        "there is: rollout.maxSurge 0 and maxUnavailable 1."
    )
    assert (world.revisions(), world.num_available()) == ("aab", 2)

    world.capacity = 3
    world.run(90)
    assert (world.stored.step, world.revisions()) == ("Complete", "bb")


@pytest.mark.parametrize(
    ("revision", "reason", "within_s"),
    [(CRASHES, "CrashLoop", 20), (FAILS_REQUESTS, "AnalysisFailed", 22), (NEVER_STARTS, "DeadlineExceeded", 125)],
)
def test_a_bad_revision_is_rolled_back_and_not_tried_again(revision, reason, within_s):
    world = serving(replicas=2)
    world.ask(revision=revision)
    world.run(within_s)
    assert world.stored.failure.reason == reason
    assert world.num_available() == 2
    world.run(15)
    assert (world.stored.step, world.revisions(), world.num_available()) == ("RolledBack", "aa", 2)

    assert acts(world, 300) == []
    assert world.step.message.startswith(f"Revision {revision} failed ({reason}): ")


def test_the_analysis_of_an_engine_with_few_requests_lasts_until_it_has_enough():
    world = serving(replicas=2)
    world.ask(revision=SLOW)
    # The engine serves after 16 s, and 6 of its requests end within holdSeconds (20). The analysis needs 10 requests.
    world.run(40)
    assert (world.stored.step, world.stored.failure) == ("Analyzing", None)

    world.run(10)
    assert world.stored.failure.reason == "AnalysisFailed"
    assert world.stored.failure.message == (
        "99 % of first tokens take more than 1 s in the new revision, and at most 0.25 s in the old; 2 times as long "
        "is allowed."
    )


def test_too_few_requests_in_three_times_as_long_pass_and_the_deadline_waits_for_that():
    world = serving(replicas=2, progressDeadlineSeconds=20, analysis={"holdSeconds": 20, "minRequests": 21})
    world.ask(revision=SLOW)
    world.run(70)
    assert world.stored.step == "Analyzing"

    world.run(10)  # 20 requests in 60 s
    assert (world.stored.step, world.stored.failure) == ("Promoting", None)


def test_a_failed_revision_is_tried_again_once_the_spec_had_another():
    world = serving(replicas=1)
    world.ask(revision=CRASHES)
    world.run(60)
    world.ask(replicas=2)
    world.run(60)
    assert (world.stored.step, world.revisions()) == ("RolledBack", "aa")

    world.ask(revision="a")
    world.run(3)
    assert (world.stored.step, world.stored.failure) == ("Complete", None)
    world.ask(revision=CRASHES)
    world.run(3)
    assert (world.stored.step, world.revisions()) == ("Starting", "aax")


def test_a_rollback_takes_back_engines_that_drain_and_recreates_those_that_are_gone():
    world = serving(replicas=2, maxSurge=0, maxUnavailable=1)
    world.has_stuck_streams = True
    world.ask(revision=CRASHES)
    world.run(5)
    assert [each.is_drained for each in world.running] == [False, True]

    world.ask(revision="a")
    assert acts(world, 5) == [("undrain", "a-1"), ("route_on", "a-1")]
    assert (world.stored.step, world.num_available()) == ("Complete", 2)

    world.ask(revision=CRASHES)
    world.run(60)
    assert (world.stored.step, world.revisions(), world.num_available()) == ("RolledBack", "aa", 2)


def test_without_auto_rollback_the_rollout_stops_and_the_bad_engine_gets_no_requests():
    world = serving(replicas=2, autoRollback=False)
    world.ask(revision=FAILS_REQUESTS)
    world.run(100)

    assert (world.stored.step, world.revisions(), world.num_available()) == ("Halted", "aay", 2)
    assert [each.is_routed for each in world.running] == [True, True, False]

    world.ask(auto_rollback=True)
    world.run(20)
    assert (world.stored.step, world.revisions()) == ("RolledBack", "aa")


@pytest.mark.parametrize("after_s", [0, 5, 18, 40, 45, 60])
def test_a_paused_rollout_changes_nothing_and_continues_afterwards(after_s):
    world = serving(replicas=2)
    world.ask(revision="b")
    world.run(after_s)
    world.ask(paused=True)
    world.run(30)
    before = world.revisions()
    assert acts(world, 300) == []
    assert (world.stored.step, world.revisions(), world.num_available() >= 2) == ("Paused", before, True)

    world.ask(paused=False)
    world.run(100)
    assert (world.stored.step, world.revisions()) == ("Complete", "bb")


def test_a_change_in_the_middle_of_a_rollout_begins_another():
    world = serving(replicas=2)
    world.ask(revision=NEVER_STARTS)
    world.run(5)
    world.ask(revision="c")

    steps = story(world, 120)
    assert steps[0] == ("Starting", "aa", 2)
    assert steps[-1] == ("Complete", "cc", 2)
    assert min(available for _, _, available in steps) == 2


def test_going_back_reuses_the_engines_that_still_run():
    world = serving(replicas=3)
    world.ask(revision="b")
    while world.revisions() != "aab" or world.num_available() != 3:
        world.run(1)
    kept = {each.name for each in world.running if each.revision == "a"}
    world.ask(revision="a")
    world.run(60)

    assert (world.stored.step, world.revisions()) == ("Complete", "aaa")
    assert kept < {each.name for each in world.running}


def test_the_first_revision_needs_no_rollout_and_neither_does_one_after_a_revision_that_never_served():
    world = Rolling(make_desired(CRASHES, 2))
    world.run(60)
    assert (world.stored.step, world.stored.failure) == ("Scaling", None)
    world.ask(revision="b")

    # One engine more than `replicas` may exist. So the second new engine is created only after an old engine is
    # deleted.
    assert [step for step in story(world, 60) if step[0] != "Scaling"] == [
        ("Replacing", "b", 0),
        ("Complete", "bb", 2),
    ]


def test_more_and_fewer_replicas_in_the_middle_of_a_rollout():
    world = serving(replicas=2)
    world.ask(revision="b")
    world.run(5)
    world.ask(replicas=3)
    world.run(15)
    assert (world.stored.step, world.revisions()) == ("Analyzing", "aaab")
    world.ask(replicas=1)
    world.run(100)

    assert (world.stored.step, world.revisions()) == ("Complete", "b")


def test_the_least_busy_engine_is_terminated_when_there_are_fewer_replicas():
    world = serving(replicas=3)
    view = world.view()
    busy = dict(zip(("a-0", "a-1", "a-2"), (5, 1, 4), strict=True))
    engines = tuple(replace(engine, num_in_flight=busy[engine.name]) for engine in view.engines)

    step = next_step(make_desired("a", 2), world.stored, View(engines=engines), world.wall)
    assert step.state.terminating == {"a-1": ""}


def test_no_replicas_suspend_and_some_resume():
    world = serving(replicas=2)
    world.ask(replicas=0)
    world.run(20)
    assert (world.stored.step, world.revisions()) == ("Complete", "")
    world.ask(replicas=1)
    world.run(20)
    assert (world.stored.step, world.revisions(), world.num_available()) == ("Complete", "a", 1)


def test_a_decision_is_written_before_it_is_acted_on():
    world = serving(replicas=2)
    world.ask(revision="b")
    first = world.reconcile()
    assert (first.make, first.state.counts, first.requeue_after_s) == ({}, {"a": 2, "b": 1}, 0.0)
    assert world.reconcile().make == {"b": 1}


def test_an_engine_that_crashes_once_after_its_analysis_undoes_nothing():
    state = RolloutState(
        current_revision="a", update_revision="b", has_served=True, is_promoted=True, counts={"a": 1, "b": 1}
    )
    engines = well("a-0 b-0")

    def failure(num_crashes):
        view = View(engines=engines, num_crashes=num_crashes, cause="It ended.")
        return next_step(make_desired("b", 2), state, view, BEGIN + timedelta(seconds=1)).state.failure

    assert failure(1) is None
    assert failure(2).reason == "CrashLoop"


def well(names):
    """Engines that serve. The letter in a name such as `a-0` is the revision."""
    return tuple(
        ReplicaView(name=each, revision=each[0], state="well", is_routed=True, is_listed=True) for each in names.split()
    )


def test_an_old_engine_that_was_to_make_room_stays_once_there_may_be_one_more_also_while_paused():
    # The state is from a time with maxSurge 0. Then one of the two old engines had to be terminated first.
    state = RolloutState(current_revision="a", update_revision="b", has_served=True, counts={"a": 1, "b": 1})
    view = View(engines=well("a-0 a-1 b-0"))
    with_surge = make_desired("b", 2, maxSurge=1, paused=True)
    without_surge = make_desired("b", 2, maxSurge=0, maxUnavailable=1, paused=True)

    assert revision_counts(with_surge, state, view) == {"a": 2, "b": 1}
    assert revision_counts(without_surge, state, view) == {"a": 1, "b": 1}


@pytest.mark.parametrize("is_paused", [False, True])
def test_engines_of_an_unproven_revision_are_the_first_of_too_many_to_be_terminated(is_paused):
    # There were 4 replicas, and the state does not record that b passed its analysis. Now 3 engines may exist.
    state = RolloutState(current_revision="a", update_revision="b", has_served=True, counts={"a": 2, "b": 2})

    found = revision_counts(make_desired("b", 2, paused=is_paused), state, View(engines=well("a-0 a-1 b-0 b-1")))
    assert found == {"a": 2, "b": 1}


def test_a_rollout_in_which_nothing_may_move_is_refused():
    with pytest.raises(ValidationError, match="maxSurge and maxUnavailable are both 0"):
        Rollout.model_validate({"maxSurge": 0, "maxUnavailable": 0})


def test_an_engine_that_drains_is_taken_back_when_too_few_serve_without_it():
    world = serving(replicas=2)
    world.has_stuck_streams = True
    world.ask(replicas=1)
    world.run(5)
    assert [(each.name, each.is_drained) for each in world.running] == [("a-0", False), ("a-1", True)]

    world.engines["a-0"].ill_s = 30
    assert {("undrain", "a-1"), ("route_on", "a-1")} <= set(acts(world, 3))
    assert world.num_available() == 1
    world.has_stuck_streams = False
    world.run(60)
    assert (world.stored.step, world.revisions(), world.num_available()) == ("Complete", "a", 1)


def test_nodes_have_time_to_drop_an_endpoint_before_its_engine_refuses_requests():
    world = serving(replicas=2)
    world.ask(replicas=1)
    unlisted_at = drained_at = None
    for second in range(20):
        world.run(1)
        (engine,) = [each for each in world.engines.values() if each.name == "a-1"] or [None]
        if engine is None or engine.ends_s is not None:
            break
        if unlisted_at is None and not engine.is_routed and not engine.is_listed:
            unlisted_at = second
        if drained_at is None and engine.is_drained:
            drained_at = second

    assert drained_at - unlisted_at >= 2


def test_an_engine_that_is_ill_for_a_moment_is_no_new_step():
    world = serving(replicas=2)
    began = world.stored.step_time
    world.engines["a-1"].ill_s = 10
    world.run(5)

    assert world.num_available() == 1
    assert (world.stored.step, world.stored.step_time) == ("Complete", began)
