"""The rollout planner with a lost state, or a state that does not match the existing engines."""

import pytest

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import ReplicaView, View
from rayloom_operator.decide.rollout.planner import next_step
from rayloom_operator.times import moment
from rt_rolling import CRASHES, Rolling, Running, make_desired


def serving(replicas, **rollout):
    """A world in which engines of the revision "a" serve."""
    world = Rolling(make_desired("a", replicas, **rollout))
    world.run(20)
    assert (world.stored.step, world.num_available()) == ("Complete", replicas)
    return world


def test_a_lost_state_is_replaced_by_one_of_the_engines_that_serve():
    world = serving(replicas=2)
    world.ask(revision="b")
    world.run(5)
    world.stored = RolloutState()
    world.reconcile()
    assert (world.stored.current_revision, world.stored.counts) == ("a", {"a": 2, "b": 1})
    world.run(100)
    assert (world.stored.step, world.revisions()) == ("Complete", "bb")


def test_engines_that_serve_are_kept_before_engines_that_never_did():
    # The state has no count for "a", as after a loss of the state. The engine of "x" occupies the room that "b" needs.
    world = serving(replicas=2, maxSurge=0, maxUnavailable=1)
    world.end(world.engines["a-0"])
    world.pass_time(9)
    world.engines["x-0"] = Running("x-0", CRASHES, age_s=20, is_placed=True)
    world.stored = RolloutState(current_revision="b", update_revision="b", counts={CRASHES: 1, "b": 2})
    world.ask(revision="b")
    world.run(90)

    assert (world.stored.step, world.revisions(), world.num_available()) == ("Complete", "bb", 2)


@pytest.mark.parametrize(("is_listed", "stamped"), [(True, ""), (False, "2026-01-02T03:04:00Z")])
def test_the_drain_time_begins_again_where_an_engine_is_listed_after_its_label_went(is_listed, stamped):
    desired, wall = make_desired("a", replicas=0), moment("2026-01-02T03:04:02Z")
    stored = RolloutState(current_revision="a", update_revision="a", terminating={"c-a-0": "2026-01-02T03:04:00Z"})
    view = View(engines=(ReplicaView(name="c-a-0", revision="a", state="well", is_listed=is_listed),))

    written = next_step(desired, stored, view, wall)
    acted = next_step(desired, written.state, view, wall)

    assert written.state.terminating == acted.state.terminating == {"c-a-0": stamped}
    assert (written.drain, acted.drain) == ((), () if is_listed else ("c-a-0",))
