"""The planner's view of engines."""

import pytest

from rayloom_operator.api.status import Failure, GroupStatus, Reason
from rayloom_operator.decide.rollout.view import view_of
from rayloom_operator.observe.observed import Observed
from rt_operator import (
    NOW,
    crashed,
    make_group,
    make_pod,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    waiting,
)

ONE = make_resolved()
UNPLACED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]


def of(*groups, memory=None):
    return view_of(Observed(replicas=groups), memory or {}, "00000000", mono=NOW)


@pytest.mark.parametrize(
    ("group", "state"),
    [
        (make_serving(ONE), "well"),
        (make_serving(ONE, reading=make_reading(make_said("draining"))), "draining"),
        (make_serving(ONE, reading=make_reading(make_said("recovering"))), "ill"),
        (make_serving(ONE, reading=make_reading(make_said("starting", None))), "starting"),
        (make_group(make_pod(engine=waiting("ContainerCreating"))), "pending"),
        (make_group(make_pod(engine=crashed(1))), "pending"),
        (make_group(make_pod(node="", conditions=UNPLACED, engine=waiting("x"))), "unschedulable"),
        (make_group(), "pending"),
    ],
)
def test_each_state_of_an_engine_is_one_word(group, state):
    (engine,) = of(group).engines

    assert engine.state == state


@pytest.mark.parametrize(
    ("counts", "number"),
    [
        ({"in_flight": 2}, 2),  # an engine of an older version
        ({"in_flight": 2, "running": 1}, 2),
        ({"running": 3}, 3),
        ({"waiting": 3}, 3),
        ({"in_flight": 2, "running": 2, "waiting": 3}, 5),
        ({}, 0),
    ],
)
def test_sequences_of_gateways_are_work_of_an_engine(counts, number):
    (engine,) = of(make_serving(ONE, reading=make_reading(make_said("draining", **counts)))).engines

    assert engine.num_in_flight == number


@pytest.mark.parametrize("is_found", [False, True])
@pytest.mark.parametrize("route", [False, True])
def test_an_engine_is_listed_by_its_endpoint_and_not_by_its_label(route, is_found):
    (engine,) = of(make_group(make_pod(route=route), reading=make_reading(make_said()), is_found=is_found)).engines

    assert (engine.is_routed, engine.is_listed) == (route, is_found)
    assert engine.is_available == (route and is_found)


@pytest.mark.parametrize(
    ("reason", "revision", "num_crashes"),
    [
        (Reason.ENGINE_FAILED, "00000000", 2),
        (Reason.NODE_LOST, "00000000", 0),
        (Reason.HEAD_LOST, "00000000", 0),
        (Reason.ENGINE_FAILED, "11111111", 0),
    ],
)
def test_crashes_count_for_the_update_revision_alone(reason, revision, num_crashes):
    failure = Failure(uid="u", reason=reason, message="It ended.", time="2026-01-02T03:04:05Z")
    times = {"last_transition_time": "2026-01-02T03:04:05Z", "restarts": 2, "failure": failure}
    before = GroupStatus(name=f"chat-{revision}-0", revision=revision, state="BackOff", reason=reason, **times)
    seen = of(memory={before.name: before})

    assert (seen.num_crashes, seen.cause) == (num_crashes, "It ended." if num_crashes else "")
