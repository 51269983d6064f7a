"""Property tests of the scaler: random loads, rollouts and user writes, with invariants for each state."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.decide.scaling.inputs import Bounds, RolloutActivity
from rayloom_operator.decide.scaling.load import Held
from rayloom_operator.decide.scaling.windows import Windows
from rt_scaling import BOUNDS, ScaledWorld, decided, make_fleet

LOADS = st.floats(0, 12, allow_nan=False) | st.just(0.0)
BOUNDED = st.tuples(st.integers(0, 4), st.integers(1, 8), st.sampled_from([20.0, 40.0])).map(
    lambda each: Bounds(least=min(each[0], each[1]), most=each[1], idle_s=each[2])
)
# One event: (kind, load, number of decisions).
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["load", "load", "load", "silent", "roll", "wait", "user", "restart", "held", "blind", "away"]),
        LOADS,
        st.integers(1, 25),
    ),
    min_size=1,
    max_size=8,
)


def play(world, event):
    """Applies one event, and yields each decision with the rollout's activity at that time."""
    what, load, number = event
    rollout = {"roll": RolloutActivity.ROLLING, "wait": RolloutActivity.WAITING}.get(what, RolloutActivity.SETTLED)
    if what == "user":
        world.put(int(load), "kubectl")
    elif what == "restart":
        world.restart()
    held = {
        "held": Held(tokens=int(load * 100), requests=1),
        "blind": Held(num_blind=1, is_complete=False),
        "away": Held(is_complete=False),  # a gateway pod is not ready
    }.get(what, Held())
    for _ in range(number):
        before = world.replicas
        yield before, rollout, what, load, world.turn(load, rollout=rollout, is_complete=what != "silent", held=held)


HISTORIES = {"bounds": BOUNDED, "start_s": st.sampled_from([2.0, 8.0, 30.0]), "events": EVENTS}


@settings(max_examples=300, deadline=None)
@given(**HISTORIES)
def test_whatever_happens(bounds, start_s, events):
    check_history(bounds, start_s, events)


# test_whatever_happens is the same test with fewer histories.
@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(**HISTORIES)
def test_whatever_happens_in_thousands_of_histories(bounds, start_s, events):
    check_history(bounds, start_s, events)


def check_history(bounds, start_s, events):
    world = ScaledWorld(bounds=bounds, start_s=start_s, windows=Windows(20.0))
    busy_at, is_suspended = 0.0, False
    for event in events:
        for before, rollout, what, load, found in play(world, event):
            after = found.write
            if load > 0 or what in ("silent", "held", "blind", "away"):
                busy_at = world.at
            if what == "user" and found.state.reason == "Suspended":
                is_suspended = True
            is_suspended = is_suspended and world.replicas == 0
            if is_suspended:
                assert after is None, "a service that a user suspended is never woken"
            elif before == 0 and what in ("held", "blind") and bounds.least == 0:
                assert after is not None, "a service with held requests is woken in the same look"
            if after is None:
                continue
            assert bounds.least <= after <= bounds.most, "within the bounds"
            if rollout is not RolloutActivity.SETTLED:
                assert rollout is RolloutActivity.WAITING, "never in a rollout"
                assert after < before, "none is added while one finds no node"
            if after == 0:
                assert bounds.least == 0, "zero only where it is allowed"
                assert world.at - busy_at >= bounds.idle_s, "zero only after an idle time"
            elif after < before <= bounds.most:
                assert what != "silent", "missing figures remove nothing"
                assert after >= before / 2, "at most half of the engines leave at once"
            if before == 0:
                is_asked = what in ("held", "blind") or bounds.least > 0
                assert is_asked, "only requests, a gateway without a tokenizer or the minimum wake a service"


@settings(max_examples=25, deadline=None)
@given(load=st.floats(0, 9, allow_nan=False), replicas=st.integers(1, 8), start_s=st.sampled_from([4.0, 60.0]))
def test_a_steady_load_moves_the_number_one_way_only_and_then_never_again(load, replicas, start_s):
    world = ScaledWorld(replicas=replicas, start_s=start_s)
    for _ in range(600):
        world.turn(load)
    steps = [after - before for _, before, after, _ in world.changes]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps), world.changes
    assert not world.changes or world.changes[-1][0] < 1000, "it comes to rest"


@settings(max_examples=300, deadline=None)
@given(
    replicas=st.integers(1, 8),
    load=st.floats(0, 9, allow_nan=False),
    more=st.floats(0, 9, allow_nan=False),
    seconds=st.sampled_from([2, 30, 60, 120]),
)
def test_more_load_never_means_fewer_engines(replicas, load, more, seconds):
    def number(of):
        fleet = make_fleet(replicas, of)
        fleet = replace(fleet, samples=tuple(each for each in fleet.samples if each.at >= 1000 - seconds))
        written = decided(fleet, bounds=BOUNDS).write
        return replicas if written is None else written

    assert number(load) <= number(load + more)
