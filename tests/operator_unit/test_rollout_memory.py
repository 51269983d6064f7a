"""What the planner of rolls makes of engines whose history nobody remembers, or that are not as it is remembered."""

import pytest

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.decide.rollout.counts import Engine, Seen
from rayloom_operator.decide.rollout.planner import next_step
from rayloom_operator.times import moment
from rt_rolling import CRASHES, Rolling, Running, make_order


def serving(replicas, **rollout):
    """A world in which engines of the revision "a" serve."""
    world = Rolling(make_order("a", replicas, **rollout))
    world.run(20)
    assert (world.memory.step, world.num_available()) == ("Complete", replicas)
    return world


def test_a_lost_state_is_made_up_from_what_serves():
    world = serving(replicas=2)
    world.ask(revision="b")
    world.run(5)
    world.memory = RolloutState()
    world.turn()
    assert (world.memory.current_revision, world.memory.counts) == ("a", {"a": 2, "b": 1})
    world.run(100)
    assert (world.memory.step, world.revisions()) == ("Complete", "bb")


def test_what_serves_is_not_counted_out_by_what_never_did():
    # Nothing of "a" was decided, as after a memory that was lost; the engine of "x" holds the room that "y" needs.
    world = serving(replicas=2, maxSurge=0, maxUnavailable=1)
    world.end(world.running["a-0"])
    world.pass_time(9)
    world.running["x-0"] = Running("x-0", CRASHES, age=20, is_placed=True)
    world.memory = RolloutState(current_revision="b", update_revision="b", counts={CRASHES: 1, "b": 2})
    world.ask(revision="b")
    world.run(90)

    assert (world.memory.step, world.revisions(), world.num_available()) == ("Complete", "bb", 2)


@pytest.mark.parametrize(("is_listed", "stamped"), [(True, ""), (False, "2026-01-02T03:04:00Z")])
def test_the_time_of_nodes_begins_anew_where_an_engine_is_listed_after_its_label_went(is_listed, stamped):
    order = make_order("a", replicas=0)
    memory = RolloutState(current_revision="a", update_revision="a", leaving={"c-a-0": "2026-01-02T03:04:00Z"})
    engine = Engine(name="c-a-0", revision="a", state="well", is_listed=is_listed)

    step = next_step(order, memory, Seen(engines=(engine,)), moment("2026-01-02T03:04:02Z"))

    assert step.state.leaving == {"c-a-0": stamped}
    assert step.drain == (() if is_listed else ("c-a-0",))
