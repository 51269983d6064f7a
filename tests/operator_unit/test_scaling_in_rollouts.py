"""The scaler together with the rollout planner: paused and halted rollouts, and engines that find no node.

The engines are those of the planner's simulated service. A test sets their total load, and the scaler decides every 2 s
with a window of 10 s.
"""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.api.autoscaling.state import ScalingState
from rayloom_operator.decide.rollout.planner import Planned
from rayloom_operator.decide.scaling.inputs import Bounds
from rayloom_operator.decide.scaling.load import Held
from rayloom_operator.decide.scaling.scaler import decide_scaling
from rayloom_operator.decide.scaling.view import fleet_of, staying_engines
from rayloom_operator.decide.scaling.windows import Sample, Windows
from rayloom_operator.times import Now
from rt_rolling import NEVER_STARTS, Rolling, make_desired
from rt_scaling import BEGIN, make_load

WINDOWS = Windows(10.0)
BOUNDS = Bounds(least=1, most=6, idle_s=3600)


class Scaled:
    def __init__(self, replicas, capacity=99, **rollout):
        self.rolling = Rolling(make_desired("a", replicas, **rollout), capacity)
        self.rolling.run(30)
        self.at = 0.0
        self.load = 0.5 * replicas
        self.stored = ScalingState()
        self.samples = []
        self.reasons = set()

    def serving(self, revision):
        return sum(each.is_available for each in self.rolling.running if each.revision == revision)

    def run(self, seconds, bounds=BOUNDS):
        for _ in range(seconds // 2):
            self.at += 2
            self.rolling.run(2)
            found = self._look(bounds)
            self.reasons.add(found.state.reason)
            self.stored = found.state
            if found.write is not None:
                self.rolling.ask(replicas=found.write)
                self.samples = []

    def _look(self, bounds):
        rolling = self.rolling
        planned = Planned(desired=rolling.desired, view=rolling.view(), step=rolling.step)
        staying = staying_engines(planned)
        load = make_load(self.load, is_complete=not staying.others)
        self.samples.append(Sample(self.at, load.engines, load.is_complete))
        fleet = fleet_of(planned, load, Held(), tuple(self.samples))
        now = Now(BEGIN + timedelta(seconds=self.at), self.at)
        return decide_scaling(bounds, self.stored, fleet, WINDOWS, now)


@pytest.mark.parametrize("surge", [{"maxSurge": 1}, {"maxSurge": 0, "maxUnavailable": 1}])
def test_a_halted_rollout_stops_no_scaling_of_the_serving_revision(surge):
    it = Scaled(2, autoRollback=False, **surge)
    it.rolling.ask(revision=NEVER_STARTS)
    it.rolling.run(200)
    assert (it.rolling.stored.step, it.serving("a")) == ("Halted", 2 if surge["maxSurge"] else 1)
    it.load = 2.0  # three engines at 70 %
    it.run(120)
    assert it.serving("a") == 3
    it.load = 0.1
    it.run(300)
    assert (it.serving("a"), it.rolling.stored.step) == (1, "Halted")
    # Without a surge, the failed engine is one of `replicas`.
    assert it.rolling.desired.replicas == (1 if surge["maxSurge"] else 2)


def test_a_maximum_does_not_end_the_last_serving_engine_of_a_halted_rollout():
    it = Scaled(2, autoRollback=False, maxSurge=0, maxUnavailable=1)
    it.rolling.ask(revision=NEVER_STARTS)
    it.rolling.run(200)
    it.run(60, bounds=Bounds(least=1, most=1, idle_s=3600))
    assert (it.serving("a"), it.rolling.desired.replicas) == (1, 2)


def test_a_paused_rollout_scales_and_one_in_progress_does_not():
    it = Scaled(1)
    it.rolling.ask(revision="b", paused=True)
    it.rolling.run(60)
    it.load = 2.0
    it.run(120)
    assert (it.rolling.stored.step, it.serving("a"), it.rolling.desired.replicas) == ("Paused", 3, 3)
    it.reasons.clear()
    it.load = 4.0
    it.rolling.ask(paused=False)
    it.run(8)
    assert it.reasons == {"RollingOut"}


def test_engines_without_a_node_are_given_up_once_the_load_does_not_take_them():
    it = Scaled(2, capacity=2)
    it.load = 2.0
    it.run(60)
    # A third engine finds no node. The load needs this engine, so the engine waits, and the scaler adds no further
    # engine.
    assert (it.rolling.stored.step, it.rolling.desired.replicas, it.serving("a")) == ("WaitingForCapacity", 3, 2)
    it.load = 4.0
    it.run(60)
    assert (it.rolling.desired.replicas, it.stored.reason) == (3, "WaitingForCapacity")
    it.load = 1.0
    it.run(200)
    assert (it.rolling.desired.replicas, it.serving("a"), it.rolling.stored.step) == (2, 2, "Complete")


def test_an_engine_that_loses_its_node_later_is_given_up_too():
    it = Scaled(3)
    it.rolling.capacity = 2
    it.rolling.end(it.rolling.running[0])
    it.rolling.run(30)
    assert it.rolling.stored.step == "Complete"  # the rollout had completed before
    it.load = 0.9
    it.run(200)
    assert (it.rolling.desired.replicas, it.serving("a")) == (2, 2)


@settings(max_examples=12, deadline=None)
@given(
    replicas=st.integers(1, 4),
    surge=st.integers(0, 2),
    is_paused=st.booleans(),
    seconds=st.integers(0, 60),
    loads=st.lists(st.floats(0, 5), min_size=1, max_size=2),
)
def test_a_stopped_rollout_never_ends_the_last_serving_engine(replicas, surge, is_paused, seconds, loads):
    rollout = {"maxSurge": surge, "maxUnavailable": 0 if surge else 1, "autoRollback": False}
    it = Scaled(replicas, **rollout)
    it.rolling.ask(revision="b" if is_paused else NEVER_STARTS)
    it.rolling.run(seconds if is_paused else 200)
    if is_paused:
        it.rolling.ask(paused=True)
    served = it.rolling.num_available()
    for load in loads:
        it.load = load
        for _ in range(8):
            it.run(6)
            assert it.rolling.num_available() >= min(1, served)
    assert BOUNDS.least <= it.rolling.desired.replicas <= BOUNDS.most
