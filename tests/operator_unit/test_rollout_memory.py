"""What the planner of rolls makes of engines whose history nobody remembers."""

from rayloom_operator.api_rollout import RolloutState
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
