"""Engines, pods, nodes and operators that fail at random: what holds in every turn, and that it ends well.

In every turn: no RayCluster is made while one of its name is there or was within a minute, none that serves is deleted
unless it is one too many, there are no more than replicas, force is used on lost nodes alone. And no engine is made
more often than its back-off allows.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rt_operator import conditions
from rt_simulation import NODES, Simulation

# From ARCHITECTURE's table of delays, 0, 10, 20, 40, 80 and then 300 s: made at most 8 times within 10 minutes.
_MAX_MADE = 8
_WINDOW_S = 600.0


class Recovery(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = Simulation()

    @initialize(replicas=st.integers(1, 3))
    def begin(self, replicas):
        self.world.ask(replicas)

    def engine(self, pick):
        """One of the engines that are to stay; None where there is none."""
        found = [each for each in self.world.clusters.values() if not each.is_leaving]
        return found[pick % len(found)] if found else None

    @rule(seconds=st.integers(1, 90))
    def time_passes(self, seconds):
        for _ in range(0, seconds, 3):
            self.world.pass_time(3)
            self.world.run_turn()

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

    @rule(pick=st.integers(0, 9), seconds=st.integers(100, 400))
    def an_engine_keeps_failing(self, pick, seconds):
        cluster = self.engine(pick)
        if cluster is not None:
            self.world.cursed = {cluster.line}
            self.time_passes(seconds)

    @rule(pick=st.integers(0, 9))
    def an_engine_comes_back_when_it_was_given_up_already(self, pick):
        cluster = self.engine(pick)
        if cluster is None or not self.world.serves(cluster):
            return
        cluster.fault = "hung"
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

    @rule(node=st.sampled_from(NODES))
    def a_node_is_lost(self, node):
        self.world.lost.setdefault(node, self.world.t)

    @rule(node=st.sampled_from(NODES))
    def a_node_comes_back(self, node):
        self.world.lost.pop(node, None)

    @rule(replicas=st.integers(1, 3))
    def the_service_is_scaled(self, replicas):
        self.world.ask(replicas, self.world.spec["engine"]["args"]["threads"])

    @rule(threads=st.sampled_from([1, 2]))
    def the_spec_changes(self, threads):
        self.world.ask(self.world.spec["replicas"], threads)

    @rule(pick=st.integers(0, 9))
    def somebody_deletes_an_engine(self, pick):
        cluster = self.engine(pick)
        if cluster is not None:
            cluster.is_leaving = True
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
        """Faults stop, but one node stays away; then every engine serves, and nothing is said to be broken."""
        world = self.world
        world.lost, world.cursed = dict(list(world.lost.items())[:1]), set()
        for _ in range(180):
            world.pass_time(5)
            world.run_turn()
        said = conditions(world.document)
        assert (said["Available"], said["Degraded"]) == (("True", "Serving"), ("False", "Healthy")), world.document
        assert world.document["ready"] == f"{world.spec['replicas']}/{world.spec['replicas']}"
        assert len(world.clusters) == world.spec["replicas"]


Recovery.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None, print_blob=True)
TestRecovery = Recovery.TestCase
