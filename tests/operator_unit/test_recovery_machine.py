"""Invariants while engines, pods, nodes and operators fail at random and specs change. Every run must end well.

The invariants of every reconcile: No RayCluster is created beyond replicas + maxSurge. No RayCluster is created for a
revision that failed. A new RayCluster never gets a name that another RayCluster has, or had within the last minute. A
serving engine loses its route only if three conditions hold together: (1) the status lists the engine as terminating;
(2) enough other engines serve; (3) there is an engine too many, or the new revision has served. Before an engine that
has not failed for good is deleted, it has drained, and clients no longer find it. Pods are deleted without a grace
period only on lost nodes. Engines are created no more often than their back-off allows.
"""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rt_operator import conditions
from rt_simulation import FAILS_REQUESTS, NODES, Simulation

# The delays in ARCHITECTURE.md are 0, 10, 20, 40, 80 and then 300 s. So there are at most 8 creations within 10
# minutes.
_MAX_MADE = 8
_WINDOW_S = 600.0
_ALL_THREADS = (1, 2, FAILS_REQUESTS)
_THREADS, _OTHER = st.sampled_from(_ALL_THREADS), st.integers(1, len(_ALL_THREADS) - 1)
# A first new engine serves after 20 s and proves itself within 10 s. Each following engine takes as long, and a drain
# takes 20 s more.
_A_WHILE = st.sampled_from([25, 33, 42, 60, 75, 100, 140])
_BOUNDS = st.sampled_from([(1, 0), (1, 0), (0, 1), (1, 1), (2, 0)])


class Recovery(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = Simulation()
        self.had_fault = False

    @initialize(replicas=st.integers(1, 3), bounds=_BOUNDS, are_stuck=st.booleans())
    def begin(self, replicas, bounds, are_stuck):
        self.world.bounds = {"maxSurge": bounds[0], "maxUnavailable": bounds[1]}
        self.world.has_stuck_streams = are_stuck
        self.world.ask(replicas)
        self.world.run(36, 3)

    def engine(self, pick):
        """Returns an engine that the planner keeps, or None if there is none."""
        found = self.world.there
        return found[pick % len(found)] if found else None

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds):
        self.world.run(seconds, 3)

    @rule(seconds=st.integers(1, 60))
    def time_passes_without_an_operator(self, seconds):
        self.world.pass_time(seconds)
        self.world.restart_operator()

    @rule(num_actions=st.integers(0, 3))
    def the_operator_dies_in_a_turn(self, num_actions):
        self.world.run_turn(num_actions)
        self.world.restart_operator()

    @rule(pick=st.integers(0, 9), fault=st.sampled_from(["hung", "spent"]))
    def an_engine_fails(self, pick, fault):
        cluster = self.engine(pick)
        if cluster is not None and "head" in cluster.pods:
            cluster.fault = fault
            self.had_fault = True

    @rule(pick=st.integers(0, 9), seconds=st.integers(100, 400))
    def an_engine_keeps_failing(self, pick, seconds):
        cluster = self.engine(pick)
        if cluster is not None:
            self.world.cursed = {cluster.line}
            self.had_fault = True
            self.time_passes(seconds)

    @rule(pick=st.integers(0, 9))
    def an_engine_comes_back_when_it_was_given_up_already(self, pick):
        cluster = self.engine(pick)
        if cluster is None or not self.world.serves(cluster):
            return
        cluster.fault = "hung"
        self.had_fault = True
        for _ in range(60):
            self.world.pass_time(1)
            self.world.run_turn()
            if any(each.get("failure", {}).get("uid") == cluster.uid for each in self.world.document["groups"]):
                break
        cluster.fault = ""
        self.world.run_turn()

    @rule(pick=st.integers(0, 9))
    def a_hung_engine_goes_on(self, pick):
        cluster = self.engine(pick)
        if cluster is not None and cluster.fault == "hung":
            cluster.fault = ""

    @rule(pick=st.integers(0, 9), kind=st.sampled_from(["head", "worker"]))
    def a_pod_is_deleted(self, pick, kind):
        cluster = self.engine(pick)
        if cluster is not None and kind in cluster.pods:
            del cluster.pods[kind]
            self.had_fault = True

    @rule(node=st.sampled_from(NODES))
    def a_node_is_lost(self, node):
        self.world.lost.setdefault(node, self.world.t)
        self.had_fault = True

    @rule(node=st.sampled_from(NODES))
    def a_node_comes_back(self, node):
        self.world.lost.pop(node, None)

    @rule(replicas=st.integers(0, 3))
    def the_service_is_scaled(self, replicas):
        self.world.ask(replicas, self.threads)

    @rule(threads=_THREADS)
    def the_spec_changes(self, threads):
        self.world.ask(self.world.order.replicas, threads)

    @rule(other=_OTHER, seconds=_A_WHILE)
    def a_roll_gets_on(self, other, seconds):
        self.world.ask(self.world.order.replicas, self.other_threads(other))
        self.world.run(seconds, 3)

    @rule(other=_OTHER, seconds=_A_WHILE, fault=st.sampled_from(["hung", "spent"]))
    def an_engine_fails_in_a_roll(self, other, seconds, fault):
        self.a_roll_gets_on(other, seconds)
        mine = [each for each in self.world.there if each.revision == self.world.revision and each.head is not None]
        for cluster in mine[:1]:
            cluster.fault = fault
            self.had_fault = True
        self.world.run(30, 3)

    @rule(other=_OTHER, seconds=_A_WHILE, later=st.integers(0, 40))
    def a_roll_is_taken_back(self, other, seconds, later):
        before = self.threads
        self.a_roll_gets_on(other, seconds)
        self.world.ask(self.world.order.replicas, before)
        self.world.run(later, 3)

    @rule(less=st.integers(1, 2), seconds=st.integers(3, 30))
    def the_service_shrinks_for_a_while(self, less, seconds):
        replicas = self.world.order.replicas
        self.world.ask(max(replicas - less, 0), self.threads)
        self.world.run(seconds, 3)
        self.world.ask(replicas, self.threads)

    def other_threads(self, other):
        """The value of `threads` of another revision than the spec's."""
        return _ALL_THREADS[(_ALL_THREADS.index(self.threads) + other) % len(_ALL_THREADS)]

    @property
    def threads(self):
        return self.world.order.engine.args.threads

    @rule(pick=st.integers(0, 9))
    def somebody_deletes_an_engine(self, pick):
        cluster = self.engine(pick)
        if cluster is not None:
            self.had_fault = cluster.is_leaving = True
            for place in cluster.pods.values():
                place.ends_at = self.world.t
            self.world.made_at.pop(cluster.line, None)

    @invariant()
    def engines_are_made_no_more_often_than_the_back_off_allows(self):
        for line, times in self.world.made_at.items():
            for first in times:
                within = [at for at in times if first <= at < first + _WINDOW_S]
                assert len(within) <= _MAX_MADE, f"the engine of {line} was made at {within}"

    def teardown(self):
        """Faults stop, but one node stays lost. Then all engines serve with one revision, and nothing is degraded."""
        world = self.world
        world.lost, world.cursed = dict(list(world.lost.items())[:1]), set()
        world.run(900, 5)
        said, state, replicas = conditions(world.document), world.rollout, world.order.replicas
        if replicas:
            assert (said["Available"], said["Degraded"]) == (("True", "Serving"), ("False", "Healthy")), world.document
        else:
            assert said["Available"] == ("False", "Suspended"), world.document
        assert state["step"] in ("Complete", "RolledBack"), state
        kept = state["currentRevision"]
        if state["step"] == "Complete":
            assert kept == world.revision
        else:
            assert kept != world.revision == state["failure"]["revision"]
            assert self.threads == FAILS_REQUESTS or self.had_fault, state
        assert world.document["ready"] == f"{replicas}/{replicas}"
        assert [each.revision for each in world.clusters.values()] == [kept] * replicas
        assert all(world.is_available(each) for each in world.clusters.values())


# hypothesis does not shrink failing examples: shrinking takes minutes, and a few steps are readable as they are.
Recovery.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestRecovery = Recovery.TestCase


class ManyRecoveries(Recovery):
    """The tests of the base class, with four times as many histories."""


ManyRecoveries.TestCase.settings = settings(Recovery.TestCase.settings, max_examples=24)
TestManyRecoveries = pytest.mark.slow(pytest.mark.timeout(900)(ManyRecoveries.TestCase))
