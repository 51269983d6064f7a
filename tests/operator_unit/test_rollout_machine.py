"""Rollouts with random failures of engines, edits of the spec at any moment, and operators that die between changes.

The invariants of every change, asserted in `rt_rolling`: There are at most replicas + maxSurge engines. The planner
leaves at least replicas - maxUnavailable engines available. No engine drains or is deleted while clients find it. No
old engine is terminated before the new revision has proven itself. No failed revision is tried again. Once the faults
stop, every eviction passes, the rollout ends, and nothing changes any more.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rt_rolling import CRASHES, FAILS_REQUESTS, NEVER_STARTS, SLOW, Rolling, make_desired

BOUNDS = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0), (0, 2)])
BAD = (SLOW, CRASHES, FAILS_REQUESTS, NEVER_STARTS)
REVISIONS = st.sampled_from(["a", "b", "c", *BAD])
# Longer than the deadlines, analyses and drains of four engines, one after the other.
_ENOUGH_S = 900


class Rolls(RuleBasedStateMachine):
    @initialize(
        replicas=st.integers(1, 4),
        bounds=BOUNDS,
        capacity=st.integers(0, 3),
        has_stuck_streams=st.booleans(),
        auto_rollback=st.booleans(),
    )
    def begin(self, replicas, bounds, capacity, has_stuck_streams, auto_rollback):
        surge, unavailable = bounds
        desired = make_desired("a", replicas, maxSurge=surge, maxUnavailable=unavailable, autoRollback=auto_rollback)
        self.world = Rolling(desired, capacity=replicas + capacity)
        self.world.has_stuck_streams = has_stuck_streams
        self.world.run(24, 3)

    def engine(self, pick):
        """Returns an existing engine, or None if there is none."""
        found = self.world.running
        return found[pick % len(found)] if found else None

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds):
        self.world.run(seconds, 2)

    @rule(seconds=st.integers(1, 60))
    def time_passes_without_an_operator(self, seconds):
        self.world.pass_time(seconds)

    @rule(nums_acts=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def the_operator_dies_in_its_reconciles(self, nums_acts):
        for num_acts in nums_acts:
            self.world.reconcile(num_acts)
            self.world.pass_time(1)

    @rule()
    def a_reconcile_comes_at_once(self):
        self.world.reconcile()

    @rule(revision=REVISIONS)
    def the_spec_changes(self, revision):
        self.world.ask(revision=revision)

    @rule(revision=REVISIONS, seconds=st.integers(20, 90))
    def a_rollout_makes_progress(self, revision, seconds):
        self.world.ask(revision=revision)
        self.world.run(seconds, 3)

    @rule(replicas=st.integers(0, 4))
    def the_service_is_scaled(self, replicas):
        self.world.ask(replicas=replicas)

    @rule(bounds=BOUNDS)
    def the_bounds_change(self, bounds):
        self.world.ask(max_surge=bounds[0], max_unavailable=bounds[1])

    @rule(is_paused=st.booleans())
    def the_rollout_is_paused_or_continues(self, is_paused):
        self.world.ask(paused=is_paused)

    @rule(pick=st.integers(0, 9), seconds=st.integers(1, 40))
    def an_engine_fails_for_a_while(self, pick, seconds):
        engine = self.engine(pick)
        if engine is not None:
            engine.ill_s = seconds

    @rule(pick=st.integers(0, 9))
    def an_engine_is_deleted_by_somebody_else(self, pick):
        engine = self.engine(pick)
        if engine is not None:
            self.world.end(engine)

    @rule(capacity=st.integers(0, 6))
    def nodes_come_and_go(self, capacity):
        self.world.capacity = capacity

    @precondition(lambda self: self.world.running)
    @rule()
    def the_stored_state_is_lost(self):
        # The record of a failure is lost as well, so the failed revision may be tried again.
        self.world.stored = type(self.world.stored)()

    def teardown(self):
        """Faults stop, nodes have room, and the rollout is not paused. Then the rollout must end well."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.capacity, world.has_stuck_streams = 99, False
        world.ask(paused=False)
        num_quiet = 0
        for _ in range(0, _ENOUGH_S, 10):
            world.pass_time(10)
            state, num_evicted = world.stored, len(world.evicted)
            has_more = world.settle()
            world.evict()
            is_quiet = not has_more and not world.acts and world.stored == state and len(world.evicted) == num_evicted
            # An engine starts within two of these reconciles, and meanwhile the planner changes nothing.
            num_quiet = num_quiet + 1 if is_quiet else 0
            if num_quiet == 4:
                break
        assert num_quiet == 4, "the rollout does not come to rest"
        has_cordoned = any(engine.is_cordoned for engine in world.running)
        assert not (world.step.holds_evictions and state.eviction_hold_time), "evictions are held for ever"
        state, desired = world.stored, world.desired
        if state.step in ("Complete", "RolledBack"):
            # In the other steps, some engines never serve. So the disruption budget still protects the engines that
            # serve.
            assert not has_cordoned, "an eviction is refused"
        asked, failure = desired.revision, state.failure
        if state.step == "Complete":
            assert world.revisions() == asked * desired.replicas
            assert world.num_available() == desired.replicas
        elif state.step == "RolledBack":
            assert failure.revision == asked != state.current_revision
            assert world.revisions() == state.current_revision * desired.replicas
            assert asked in BAD or failure.reason == "DeadlineExceeded"
        elif state.step == "Halted":
            assert not desired.rollout.auto_rollback
            assert asked in BAD or failure.reason == "DeadlineExceeded"
        else:
            # There is no revision for a rollback. The spec's revision is the first, or the state with an earlier
            # revision was lost.
            assert state.step in ("Scaling", "Replacing") and asked in (CRASHES, NEVER_STARTS), state
            assert state.current_revision == asked


class RollsAndDrains(Rolls):
    """The tests of the base class, while nodes are cordoned and drained."""

    @rule(pick=st.integers(0, 9), is_cordoned=st.booleans())
    def a_node_is_cordoned_or_comes_back(self, pick, is_cordoned):
        engine = self.engine(pick)
        if engine is not None and engine.is_placed:
            engine.is_cordoned = is_cordoned

    @rule()
    def all_nodes_are_cordoned(self):
        for engine in self.world.running:
            engine.is_cordoned = engine.is_placed

    @rule(seconds=st.integers(5, 60))
    def nodes_are_emptied(self, seconds):
        for _ in range(0, seconds, 5):
            self.world.run(5, 5)
            self.world.evict()


# hypothesis does not shrink failing examples: shrinking takes minutes, and a dozen steps are readable as they are.
Rolls.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=12,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
RollsAndDrains.TestCase.settings = settings(Rolls.TestCase.settings, max_examples=75)
TestRolls = pytest.mark.timeout(900)(Rolls.TestCase)
TestRollsAndDrains = pytest.mark.timeout(900)(RollsAndDrains.TestCase)


class ManyRolls(Rolls):
    """The tests of the base class, with ten times as many histories."""


class ManyRollsAndDrains(RollsAndDrains):
    """The tests of the base class, with more histories."""


ManyRolls.TestCase.settings = settings(Rolls.TestCase.settings, max_examples=2000)
ManyRollsAndDrains.TestCase.settings = settings(Rolls.TestCase.settings, max_examples=500)
# Each of the two takes half a minute on an idle machine, and ten times as long on a busy machine.
TestManyRolls = pytest.mark.slow(pytest.mark.timeout(900)(ManyRolls.TestCase))
TestManyRollsAndDrains = pytest.mark.slow(pytest.mark.timeout(900)(ManyRollsAndDrains.TestCase))
