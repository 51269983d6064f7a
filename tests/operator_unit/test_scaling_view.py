"""The scaler's view of engines: the engines that report their load, and the activity of the rollout planner."""

from dataclasses import replace

import pytest

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import RolloutFailure, RolloutState
from rayloom_operator.decide.rollout.inputs import ReplicaView, View
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Planned, Step
from rayloom_operator.decide.rollout.view import desired_of, view_of
from rayloom_operator.decide.scaling.inputs import RolloutActivity
from rayloom_operator.decide.scaling.load import Held, load_of
from rayloom_operator.decide.scaling.view import activity_of, engine_loads, fleet_of, staying_engines
from rayloom_operator.engines.status import ReportedLoad
from rayloom_operator.observe.observed import Observed
from rt_operator import NOW, make_reading, make_resolved, make_said, make_serving

SERVICE = make_resolved()
SAID = make_said(waiting=3).model_copy(
    update={
        "load": ReportedLoad(queued_tokens=7, running_tokens=8, max_running_tokens=9, prefill_tokens_per_second=10.0)
    }
)


def planned(name=RolloutStep.COMPLETE, *, view=None, rollout=None, **state):
    desired = replace(desired_of(SERVICE, "b"), rollout=Rollout.model_validate(rollout or {}))
    state = {"current_revision": "b", "update_revision": "b", **state}
    step = Step(state=RolloutState(step=name, **state), is_stored=True, message="")
    return Planned(desired=desired, view=view or View(), step=step)


def loads(reading, **state):
    seen = Observed(replicas=(make_serving(SERVICE, reading=reading),))
    look = planned(view=view_of(seen, {}, "b", mono=NOW), **state)
    return engine_loads(seen, staying_engines(look), NOW)


def engine(name, state="well"):
    is_well = state == "well"
    return ReplicaView(name=name, revision=name[0], state=state, is_routed=is_well, is_listed=is_well)


def test_an_engine_tells_its_load():
    (found,) = loads(make_reading(SAID))
    assert (found.is_known, found.queued_tokens, found.num_waiting) == (True, 7, 3)
    assert (found.running_tokens, found.max_running_tokens, found.prefill_per_s) == (8, 9, 10.0)


@pytest.mark.parametrize(
    "reading",
    [
        None,
        make_reading(None),
        make_reading(SAID, failing_since=109.0),  # the last request was not answered
        make_reading(SAID, at=NOW - 60),
        make_reading(SAID.model_copy(update={"state": "recovering"})),
        make_reading(make_said()),  # an engine of an earlier version
    ],
)
def test_without_a_fresh_answer_the_load_is_unknown(reading):
    (found,) = loads(reading)
    assert not found.is_known


def test_an_engine_that_leaves_does_not_count():
    name = make_serving(SERVICE).name
    assert loads(make_reading(SAID), terminating={name: ""}) == ()


@pytest.mark.parametrize("name", RolloutStep)
def test_only_a_planner_at_rest_may_be_disturbed(name):
    is_settled = name in ("Complete", "Scaling", "RolledBack")
    wanted = RolloutActivity.SETTLED if is_settled else RolloutActivity.ROLLING
    assert activity_of(planned(name)) is wanted
    # In every step, an engine that finds no node stops the scaler from adding engines.
    waiting = View(engines=(engine("b-0"), engine("b-1", "unschedulable")))
    assert activity_of(planned(name, view=waiting)) is RolloutActivity.WAITING
    leaving = planned(name, view=waiting, terminating={"b-1": ""})
    assert activity_of(leaving) is wanted


FAILED = RolloutFailure(revision="b", reason="EngineFailed", message="It ended.", time="2026-01-01T00:00:00Z")


@pytest.mark.parametrize(
    ("rollout", "state", "wanted"),
    [
        ({"paused": True}, {}, RolloutActivity.STOPPED),
        ({"autoRollback": False}, {"failure": FAILED}, RolloutActivity.STOPPED),
        ({}, {}, RolloutActivity.ROLLING),
    ],
)
def test_only_a_paused_or_halted_rollout_is_stopped(rollout, state, wanted):
    look = planned("Starting", current_revision="a", rollout=rollout, **state)
    assert activity_of(look) is wanted


def test_an_unproven_engine_is_apart_and_one_that_takes_requests_is_not():
    engines = (engine("a-0"), engine("a-1", "ill"), engine("b-0", "starting"))
    look = planned(
        "Paused",
        view=View(engines=engines),
        rollout={"paused": True, "maxSurge": 1},
        current_revision="a",
        counts={"a": 2, "b": 1},
    )
    fleet = fleet_of(look, load_of((), Held(), 2.0), Held(), ())
    assert (fleet.num_available, fleet.num_for_load, fleet.num_unproven, fleet.num_surge) == (1, 2, 1, 1)
    serving = replace(look, view=View(engines=(*engines[:2], engine("b-0"))))
    fleet = fleet_of(serving, load_of((), Held(), 2.0), Held(), ())
    assert (fleet.num_available, fleet.num_unproven) == (2, 0)
    assert staying_engines(look).loaded == {"a-0", "a-1"}
