"""Engines that move away from cordoned nodes, with numbers that can be checked by hand."""

import pytest

from rt_rolling import Rolling, make_desired


def serving(replicas=2, capacity=99, **rollout):
    """A world in which engines of the first revision serve."""
    world = Rolling(make_desired("a", replicas, **rollout), capacity)
    world.run(20)
    assert (world.stored.step, world.num_available()) == ("Complete", replicas)
    return world


def cordon(world, *names):
    for name in names:
        world.engines[name].is_cordoned = True
    world.settle()


def story(world, seconds):
    """(step, engines, number of serving engines, whether evictions are blocked), whenever one of these changes."""
    found = []
    for _ in range(seconds):
        world.run(1)
        names = " ".join(sorted(each.name for each in world.running))
        line = (world.stored.step, names, world.num_available(), world.step.holds_evictions)
        if not found or found[-1] != line:
            found.append(line)
    return found


def evicting(world, seconds):
    """The smallest number of serving engines while evictions are requested each second."""
    fewest = world.num_available()
    for _ in range(seconds):
        world.run(1)
        world.evict()
        fewest = min(fewest, world.num_available())
    return fewest


def test_another_engine_is_made_first_and_the_old_one_drains_and_is_deleted():
    world = serving(replicas=2)
    cordon(world, "a-0")

    assert story(world, 60) == [
        ("Moving", "a-0 a-1 a-2", 2, True),
        ("Moving", "a-1 a-2", 2, True),  # a-2 serves; a-0 lost its route, and its three requests have ended.
        ("Complete", "a-1 a-2", 2, True),  # The next reconcile sees that a-0 is being deleted.
    ]
    assert world.reconcile().requeue_after_s is None


def test_an_eviction_that_comes_with_the_cordon_is_held_already():
    world = serving(replicas=1)
    assert world.step.holds_evictions
    world.engines["a-0"].is_cordoned = True
    world.evict()  # like `kubectl drain`, before any reconcile
    assert world.evicted == []


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_node_is_emptied_while_all_replicas_serve(replicas):
    world = serving(replicas=replicas)
    cordon(world, *world.engines)

    assert evicting(world, 150) == replicas
    assert {available for _, available in world.evicted} <= {replicas}
    assert not any(each.is_cordoned for each in world.running)
    assert (world.stored.step, world.num_available()) == ("Complete", replicas)


def test_an_engine_whose_node_is_uncordoned_before_another_serves_stays():
    world = serving(replicas=2)
    cordon(world, "a-0")
    world.run(5)
    world.engines["a-0"].is_cordoned = False
    world.run(5)

    assert (world.stored.step, [each.name for each in world.running]) == ("Complete", ["a-0", "a-1"])


def test_an_engine_whose_node_is_uncordoned_while_it_drains_is_one_too_many():
    world = serving(replicas=2)
    cordon(world, "a-0")
    while not world.engines["a-0"].is_drained:
        world.run(1)
    world.engines["a-0"].is_cordoned = False
    world.run(10)

    assert (world.stored.step, [each.name for each in world.running]) == ("Complete", ["a-1", "a-2"])


def test_an_engine_that_drains_is_taken_back_when_its_replacement_fails():
    world = serving(replicas=1)
    world.has_stuck_streams = True
    cordon(world, "a-0")
    while not world.engines["a-0"].is_drained:
        world.run(1)
    world.engines["a-1"].ill_s = 99
    world.run(3)

    assert (world.num_available(), world.engines["a-0"].is_available) == (1, True)


def test_evictions_are_held_for_30_seconds_where_there_is_no_room():
    world = serving(replicas=2, capacity=2)
    cordon(world, "a-0")
    while world.stored.no_capacity_time == "":
        world.run(1)
    began = world.seconds
    assert world.step.holds_evictions
    while world.step.holds_evictions:
        world.run(1)

    assert world.seconds - began in (30, 31, 32)  # The operator reconciles every 2 s.
    world.evict()
    assert world.evicted[0][0] == "a-0"


def test_a_new_engine_that_never_serves_holds_an_eviction_until_the_deadline():
    world = serving(replicas=1)
    cordon(world, "a-0")
    began = world.seconds
    while world.step.holds_evictions:
        world.engines["a-1"].age_s = 0
        world.run(1)

    assert world.seconds - began in (130, 131, 132)  # progressDeadlineSeconds (120) and drainSeconds (10)
    assert (world.num_available(), world.stored.step) == (1, "Moving")


@pytest.mark.parametrize("state", ["ill", "starting"])
def test_the_eviction_of_an_engine_that_does_not_serve_is_not_held_while_others_are(state):
    world = serving(replicas=2)
    world.engines["a-0"].ill_s, world.engines["a-0"].age_s = (99, 99) if state == "ill" else (0, 0)
    cordon(world, "a-0")

    assert (world.step.holds_evictions, world.step.num_evictable, world.stored.counts) == (True, 1, {"a": 2})
    world.engines["a-1"].is_cordoned = True
    world.evict()
    assert world.evicted == [("a-0", 1)]


def test_no_eviction_is_held_where_nodes_are_not_known_or_a_cordon_is_tolerated():
    world = serving(replicas=1)
    assert world.step.holds_evictions
    world.knows_nodes = False
    assert not world.reconcile().holds_evictions
    world.knows_nodes, world.engines["a-0"].is_tolerant = True, True
    assert not world.reconcile().holds_evictions
    # A move to the same node would gain nothing.
    world.run(60)
    assert (world.stored.step, [each.name for each in world.running]) == ("Complete", ["a-0"])


def test_while_a_moved_engine_is_deleted_those_that_stay_are_held():
    world = serving(replicas=2)
    cordon(world, "a-0")
    found = {(world.step.holds_evictions, world.least_ready) for _ in range(60) if world.run(1) is None}
    assert "a-0" not in world.engines
    assert found == {(True, 2), (True, 3)}, "before and after, and while there are three"


def test_without_surge_nothing_moves_and_evictions_are_allowed():
    world = serving(replicas=2, maxSurge=0, maxUnavailable=1)
    cordon(world, "a-0")

    assert (world.stored.step, world.stored.terminating, world.step.holds_evictions) == ("Complete", {}, False)
    world.evict()
    assert world.evicted == [("a-0", 1)]


def test_a_rollout_continues_and_terminates_engines_on_cordoned_nodes_first():
    world = serving(replicas=3)
    world.ask(revision="b")
    world.run(5)
    cordon(world, "a-2")
    while not world.stored.terminating:
        world.run(1)
        assert world.step.holds_evictions
    assert (world.stored.step, list(world.stored.terminating)) == ("Promoting", ["a-2"])
    world.run(120)
    assert (world.stored.step, world.revisions(), world.evicted) == ("Complete", "bbb", [])


def test_engines_move_while_a_rollout_is_paused():
    world = serving(replicas=2)
    world.ask(revision="b", paused=True)
    world.run(5)
    cordon(world, "a-0", "a-1")

    assert evicting(world, 150) == 2
    assert not any(each.is_cordoned for each in world.running)
    assert (world.stored.step, world.stored.counts, world.revisions()) == ("Paused", {"a": 2}, "aa")
    world.ask(paused=False)
    world.run(150)
    assert (world.stored.step, world.revisions()) == ("Complete", "bb")


def test_engines_move_beside_those_of_a_halted_rollout_if_surge_leaves_room():
    world = serving(replicas=2, maxSurge=2, autoRollback=False)
    world.ask(revision="x")  # its engines crash
    world.run(60)
    assert (world.stored.step, world.revisions()) == ("Halted", "aax")
    cordon(world, "a-0", "a-1")

    assert evicting(world, 150) == 2
    assert not any(each.is_cordoned for each in world.running)
    assert (world.stored.step, world.stored.counts) == ("Halted", {"a": 2, "x": 1})


def test_a_halted_rollout_that_uses_the_surge_delays_evictions_by_30_seconds():
    world = serving(replicas=2, autoRollback=False)
    world.ask(revision="x")
    world.run(60)
    cordon(world, "a-0")
    began = world.seconds
    while world.step.holds_evictions and world.seconds - began < 99:
        world.run(1)

    assert world.seconds - began in (30, 31, 32)
    assert (world.stored.counts, world.revisions()) == ({"a": 2, "x": 1}, "aax")


def test_a_rollout_that_is_paused_after_its_analysis_keeps_its_counts_and_delays_evictions_by_30_seconds():
    world = serving(replicas=2, maxSurge=3)
    world.ask(revision="b")
    while not world.stored.is_promoted:
        world.run(1)
    world.run(10)
    world.ask(paused=True)
    world.run(30)
    counts, revisions = world.stored.counts, world.revisions()
    cordon(world, next(each.name for each in world.running if each.revision == "a"))
    began = world.seconds
    while world.step.holds_evictions and world.seconds - began < 99:
        world.run(1)

    assert world.seconds - began in (30, 31, 32)
    assert (world.stored.step, world.stored.counts, world.revisions()) == ("Paused", counts, revisions)


def test_a_paused_rollout_delays_evictions_of_the_new_revision_by_30_seconds_though_surge_leaves_room():
    world = serving(replicas=2, maxSurge=2)
    world.ask(revision="b")
    world.run(20)
    world.ask(paused=True)
    world.run(1)
    assert (world.stored.step, world.revisions(), world.num_available()) == ("Paused", "aab", 3)
    cordon(world, "b-0")
    began = world.seconds
    while world.step.holds_evictions and world.seconds - began < 99:
        world.run(1)

    assert world.seconds - began in (30, 31, 32)
    world.evict()
    assert world.evicted == [("b-0", 2)]


def test_a_rollout_that_continues_during_a_move_completes():
    world = serving(replicas=2)
    world.ask(revision="b", paused=True)
    world.run(5)
    cordon(world, "a-0")
    world.run(5)
    assert (world.stored.step, world.revisions()) == ("Paused", "aaa")
    world.ask(paused=False)

    assert evicting(world, 150) == 2
    assert (world.stored.step, world.revisions()) == ("Complete", "bb")


def test_engines_on_cordoned_nodes_that_are_not_needed_are_deleted():
    world = serving(replicas=3)
    cordon(world, "a-0", "a-1", "a-2")
    world.ask(replicas=0)
    world.run(30)

    assert (world.stored.step, world.running) == ("Complete", [])
