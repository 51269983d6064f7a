"""The scaler's view of engines: which of them report their load, and what the rollout planner does."""

from dataclasses import replace

import pytest

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.scaling.inputs import RolloutActivity
from rayloom_operator.decide.scaling.view import activity_of, engine_loads
from rayloom_operator.engines.status import ReportedLoad
from rayloom_operator.observe.observed import Observed
from rt_operator import NOW, make_reading, make_resolved, make_said, make_serving

SERVICE = make_resolved()
SAID = make_said(waiting=3).model_copy(
    update={
        "load": ReportedLoad(queued_tokens=7, running_tokens=8, max_running_tokens=9, prefill_tokens_per_second=10.0)
    }
)


def step(name=RolloutStep.COMPLETE, **state):
    return Step(state=RolloutState(step=name, **state), is_stored=True, message="")


def loads(reading, **state):
    return engine_loads(Observed(replicas=(make_serving(SERVICE, reading=reading),)), step(**state), NOW)


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
    wanted = (
        RolloutActivity.SETTLED
        if is_settled
        else RolloutActivity.WAITING
        if name == "WaitingForCapacity"
        else RolloutActivity.ROLLING
    )
    assert activity_of(step(name)) is wanted
    assert activity_of(replace(step(name), is_stored=False)) is wanted
