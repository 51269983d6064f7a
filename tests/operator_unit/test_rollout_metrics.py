"""Metrics of rollouts, counted from the statuses that the planner writes."""

import re
from datetime import datetime

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.telemetry.metrics import Metrics
from rt_rolling import BEGIN, CRASHES, FAILS_REQUESTS, Rolling, make_desired


def counted(metrics, name):
    """The values of the metric `name` by label."""
    found = re.findall(rf'^rayloom_operator_rollout_{name}{{\w+="(\w+)"}} (\S+)$', metrics.text().decode(), re.M)
    return {label: float(value) for label, value in found}


def counting(world):
    """Metrics that count every status from here on."""
    metrics, reconcile = Metrics(), world.reconcile

    def counted_reconcile(*args):
        before = world.stored
        step = reconcile(*args)
        metrics.rolled(before, world.stored, world.wall)
        return step

    world.reconcile = counted_reconcile
    return metrics


def serving(revision="a", **rollout):
    world = Rolling(make_desired(revision, 2, **rollout))
    world.run(20)
    return world


def test_a_rollout_is_counted_step_by_step_and_its_time_begins_with_the_new_spec():
    world = serving()
    metrics = counting(world)
    world.ask(revision="b")
    began = world.seconds + 1  # the next reconcile sees the change
    while world.stored.step != "Complete" or world.stored.current_revision != "b":
        world.run(1)
    world.run(30)

    assert counted(metrics, "steps_total") == {"Starting": 1, "Analyzing": 1, "Promoting": 1, "Complete": 1}
    assert counted(metrics, "failures_total") == {}
    assert counted(metrics, "seconds_count") == {"Complete": 1}
    assert counted(metrics, "seconds_sum") == {"Complete": world.seconds - 30 - began}


def test_a_revision_that_fails_is_counted_once_and_so_is_its_rollback():
    world = serving()
    metrics = counting(world)
    world.ask(revision=FAILS_REQUESTS)
    while world.stored.step != "RolledBack":
        world.run(1)
        world.reconcile()  # another reconcile without a change
    seconds = (world.wall - datetime.fromisoformat(world.stored.failure.time)).total_seconds()
    world.run(30)

    assert counted(metrics, "failures_total") == {"AnalysisFailed": 1}
    assert counted(metrics, "steps_total")["RollingBack"] == counted(metrics, "steps_total")["RolledBack"] == 1
    assert counted(metrics, "seconds_count") == {"RolledBack": 1}
    assert counted(metrics, "seconds_sum") == {"RolledBack": seconds}
    assert seconds >= 3  # the engine has 3 requests, of which one ends each second


def test_a_rollout_that_halts_counts_no_rollback():
    world = serving(autoRollback=False)
    metrics = counting(world)
    world.ask(revision=CRASHES)
    world.run(40)

    assert world.stored.step == "Halted"
    assert counted(metrics, "failures_total") == {"CrashLoop": 1}
    assert counted(metrics, "seconds_count") == {}


def test_a_spec_that_goes_back_completes_no_rollout():
    world = serving()
    metrics = counting(world)
    world.ask(revision="b")
    world.run(20)
    assert world.stored.start_time
    world.ask(revision="a")
    world.run(40)

    assert (world.stored.step, world.stored.start_time) == ("Complete", "")
    assert counted(metrics, "steps_total")["Replacing"] == 1
    assert counted(metrics, "seconds_count") == {}


def test_scaling_is_a_step_and_no_rollout():
    world = serving()
    metrics = counting(world)
    world.ask(replicas=3)
    world.run(40)

    assert counted(metrics, "steps_total") == {"Scaling": 1, "Complete": 1}
    assert counted(metrics, "seconds_count") == {}


def test_an_empty_state_counts_as_nothing():
    metrics = Metrics()
    metrics.rolled(RolloutState(), RolloutState(), BEGIN)

    assert counted(metrics, "steps_total") == {}
