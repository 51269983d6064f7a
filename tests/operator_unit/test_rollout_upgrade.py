"""The next release replaces the operator in the middle of a rollout.

tests/data/rollouts_of_the_release_before.json has data of the previous release's planner for each step. The data are
the stored state (with the former names), the input, all changes until the planner had no change left, and the state
after these changes.
"""

import json
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import (
    AnalysisWindow,
    RequestCounts,
    RolloutFailure,
    RolloutState,
)
from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.api.status import stored_rollout
from rayloom_operator.decide.rollout.inputs import Desired, ReplicaView, View
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import next_step

DATA = Path(__file__).parents[1] / "data" / "rollouts_of_the_release_before.json"
CASES = json.loads(DATA.read_text(encoding="utf-8"))
# Since this release, engines on cordoned nodes move while a rollout is halted. So a third engine of revision a replaces
# a-1 in case 15.
CHANGED_COUNTS = {15: {"w": 1, "a": 3}}
CHANGES = ("make", "undrain", "route_on", "route_off", "drain", "delete", "holds_evictions", "num_evictable")
FORMER = {"hasServed", "isPromoted", "counts", "leaving", "window", "rollTime", "stepTime", "progressTime"}
FORMER |= {"mostWell", "heldTime", "shortTime"}
WHOLE = {
    "currentRevision": "a",
    "updateRevision": "b",
    "hasServed": True,
    "isPromoted": True,
    "counts": {"a": 2, "b": 1},
    "leaving": {"chat-a-0": "2026-01-02T03:00:01Z", "chat-a-1": ""},
    "window": {
        "time": "2026-01-02T03:00:02Z",
        "new": {"requests": 3, "errors": 1, "ttft": {"0.5": 1, "+Inf": 2}},
        "old": {"requests": 9, "errors": 0, "ttft": {}},
    },
    "failure": {"revision": "b", "reason": "CrashLoop", "message": "It ended.", "time": "2026-01-02T03:00:03Z"},
    "rollTime": "2026-01-02T03:00:04Z",
    "step": "Promoting",
    "stepTime": "2026-01-02T03:00:05Z",
    "progressTime": "2026-01-02T03:00:06Z",
    "mostWell": 3,
    "heldTime": "2026-01-02T03:00:07Z",
    "shortTime": "2026-01-02T03:00:08Z",
}
STATE = RolloutState(
    current_revision="a",
    update_revision="b",
    has_served=True,
    is_promoted=True,
    counts={"a": 2, "b": 1},
    terminating={"chat-a-0": "2026-01-02T03:00:01Z", "chat-a-1": ""},
    window=AnalysisWindow(
        start_time="2026-01-02T03:00:02Z",
        new=RequestCounts(requests=3, errors=1, first_token_seconds={"0.5": 1, "+Inf": 2}),
        old=RequestCounts(requests=9),
    ),
    failure=RolloutFailure(revision="b", reason="CrashLoop", message="It ended.", time="2026-01-02T03:00:03Z"),
    start_time="2026-01-02T03:00:04Z",
    step="Promoting",
    step_time="2026-01-02T03:00:05Z",
    deadline_start_time="2026-01-02T03:00:06Z",
    peak_available=3,
    eviction_hold_time="2026-01-02T03:00:07Z",
    no_capacity_time="2026-01-02T03:00:08Z",
)


def written(state):
    """The state in the form that the API server stores."""
    return RolloutStatus.of(state).model_dump(mode="json", by_alias=True, exclude_none=True)


def desired_in(case):
    given = case["desired"]
    return Desired(**given | {"rollout": Rollout.model_validate(given["rollout"])})


def view_in(case):
    engines = (
        ReplicaView(**engine | {"counts": RequestCounts(**engine.get("counts", {}))})
        for engine in case["view"]["engines"]
    )
    return View(**case["view"] | {"engines": tuple(engines)})


def rest(case):
    """The last step of a planner that begins with the stored state."""
    desired, view, wall = desired_in(case), view_in(case), datetime.fromisoformat(case["wall"])
    document = case["stored"]
    for _ in range(9):
        step = next_step(desired, stored_rollout({"rollout": document}), view, wall)
        if step.is_stored:
            return step
        document = written(step.state)
    raise AssertionError(f"decides without end: {step.state}")


def test_there_is_a_case_of_each_step_and_of_each_former_name():
    assert {case["step"] for case in CASES} >= set(map(str, RolloutStep))
    assert {name for case in CASES for name, value in case["stored"].items() if value} >= FORMER


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case['step']}-{n}" for n, case in enumerate(CASES)])
def test_the_next_step_is_the_one_that_the_release_before_made(number):
    case = CASES[number]
    step = rest(case)

    expected = case["state"] | {"counts": CHANGED_COUNTS.get(number, case["state"]["counts"])}
    assert step.state == stored_rollout({"rollout": expected})
    changes = {name: getattr(step, name) for name in CHANGES}
    made = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items() if value}
    assert made == {name: value for name, value in case["changes"].items() if name != "requeue_after_s"}
    assert step.requeue_after_s == case["changes"].get("requeue_after_s")


def test_every_former_name_is_read():
    without_value = {field.name for field in fields(RolloutState) if getattr(STATE, field.name) == field.default}
    assert without_value == {"retired"}, "the release before had no such field"
    assert stored_rollout({"rollout": WHOLE}) == STATE


def test_the_next_write_has_none_of_the_former_names_and_is_read_back():
    document = written(stored_rollout({"rollout": WHOLE}))

    assert document.keys() & FORMER == set()
    assert stored_rollout({"rollout": document}) == STATE
    assert written(RolloutState(current_revision="a", update_revision="a")) == {
        "currentRevision": "a",
        "updateRevision": "a",
        "step": "",
    }


def test_a_former_name_counts_beside_its_new_one():
    # The definition in the cluster may add an empty value under the new name.
    both = written(STATE) | {"analysisPassed": False} | {"isPromoted": True}

    assert stored_rollout({"rollout": both}).is_promoted


@pytest.mark.parametrize(
    "broken",
    [{"window": 3}, {"window": {"time": "2026-01-02T03:00:02Z", "new": 3, "old": None}}, {"counts": []}, 7, None],
)
def test_a_rollout_that_cannot_be_read_is_no_error(broken):
    document = WHOLE | broken if isinstance(broken, dict) else broken

    assert isinstance(stored_rollout({"rollout": document}), RolloutState)
