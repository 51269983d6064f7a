"""The scaler's decisions, each for a fleet that has had the same load for two minutes."""

from dataclasses import replace

import pytest

from rayloom_operator.api.autoscaling.state import ScalingState
from rayloom_operator.decide.scaling.inputs import SCALER, Bounds, RolloutActivity
from rayloom_operator.decide.scaling.load import Held
from rt_scaling import BOUNDS, ScaledWorld, decided, make_fleet, make_load, settled, steadily

ZERO = Bounds(least=0, most=8, idle_s=600.0)


@pytest.mark.parametrize(
    ("replicas", "load", "after"),
    [
        (1, 0.7, 1),  # 70 % used
        (1, 0.71, 2),
        (2, 1.4, 2),
        (2, 1.5, 3),
        (2, 2.9, 5),  # 2.9 / 0.7 = 4.14 needs 5 engines; 5 is more than twice 2, so all are added at once
        (2, 50.0, 8),  # maxReplicas
        (2, 0.51, 2),  # one engine would be 51 % used
        (2, 0.5, 1),
        (8, 0.1, 4),  # at most half of the engines are removed at once
        (3, 0.0, 2),
        (1, 0.0, 1),  # minReplicas
    ],
)
def test_the_number_follows_the_load(replicas, load, after):
    found = decided(make_fleet(replicas, load))
    assert (found.write if found.write is not None else replicas) == after


def test_a_sudden_load_needs_two_samples_and_a_moderate_one_a_whole_window():
    assert decided(make_fleet(1, 9.0, samples=steadily(9.0, seconds=0))).write is None
    assert decided(make_fleet(1, 9.0, samples=steadily(9.0, seconds=2))).write == 8
    assert decided(make_fleet(2, 1.5, samples=steadily(1.5, seconds=56))).write is None
    assert decided(make_fleet(2, 1.5, samples=steadily(1.5, seconds=60))).write == 3


def test_a_peak_within_the_window_keeps_the_engines():
    # With a start of 100 s the window is 200 s. It has three parts, and the first part had more load.
    state = settled(3, start_seconds=100)
    quiet = steadily(0.5, seconds=200)
    busy = [each if each.at > 870 else steadily(1.4, seconds=200)[index] for index, each in enumerate(quiet)]
    assert decided(make_fleet(3, 0.5, samples=quiet), state).write == 2
    assert decided(make_fleet(3, 0.5, samples=tuple(busy)), state).write is None
    assert decided(make_fleet(3, 0.5, samples=steadily(0.5, seconds=180)), state).write is None


def test_missing_figures_never_remove_an_engine():
    found = decided(make_fleet(3, 0.0, is_complete=False))
    assert (found.write, found.state.reason) == (None, "FiguresMissing")
    gap = (
        *steadily(0.0, until=980),
        *steadily(0.0, seconds=0, until=990, is_complete=False),
        *steadily(0.0, seconds=4),
    )
    assert decided(make_fleet(3, 0.0, samples=gap)).write is None


@pytest.mark.parametrize(("replicas", "load"), [(2, 9.0), (8, 0.0), (2, 0.0)])
def test_a_rollout_is_not_disturbed(replicas, load):
    found = decided(make_fleet(replicas, load, rollout=RolloutActivity.ROLLING))
    assert (found.write, found.state.reason) == (None, "RollingOut")


@pytest.mark.parametrize(
    ("replicas", "load", "num_unschedulable", "after"),
    [
        (2, 9.0, 1, None),  # another engine would also find no node
        (5, 2.0, 2, 4),  # four engines would be 50 % used
        (5, 2.4, 2, None),
        (8, 0.0, 1, 4),
        (3, 0.5, 2, 2),  # at most half at once
    ],
)
def test_engines_that_find_no_node_are_given_up_by_the_load_only(replicas, load, num_unschedulable, after):
    serving = replicas - num_unschedulable
    fleet = make_fleet(
        replicas,
        load,
        rollout=RolloutActivity.WAITING,
        num_available=serving,
        num_unschedulable=num_unschedulable,
    )
    found = decided(fleet)
    assert found.write == after
    assert found.state.reason == ("WaitingForCapacity" if after is None else "ScaledDown")
    # While an engine starts, the scaler does not know whether the other engines are enough.
    assert decided(replace(fleet, num_available=serving - 1)).write is None


def test_a_stopped_rollout_counts_engines_without_requests_apart():
    # Of three engines, one has a failed revision and two serve. Two engines at 71 % become three.
    stopped = make_fleet(3, 1.42, rollout=RolloutActivity.STOPPED, num_available=2, num_for_load=2, num_unproven=1)
    assert decided(stopped).write == 4
    low = make_fleet(3, 0.5, rollout=RolloutActivity.STOPPED, num_available=2, num_for_load=2, num_unproven=1)
    assert decided(low).write == 2
    # With a surge, the failed engine does not count as one of `replicas` when `replicas` is lowered.
    assert decided(replace(low, num_surge=1)).write == 1


@pytest.mark.parametrize(("rollout", "write"), [(RolloutActivity.ROLLING, None), (RolloutActivity.WAITING, 8)])
def test_a_lower_maximum_gives_up_engines_that_find_no_node(rollout, write):
    assert decided(make_fleet(12, 1.0, rollout=rollout)).write == write


def test_an_added_engine_that_never_serves_stops_additions_for_ten_minutes_only():
    stuck = settled(3, starting_since="2026-01-01T00:10:00Z")
    fleet = make_fleet(3, 3.5, num_available=2)
    assert decided(fleet, stuck).write is None  # 400 s later
    later = make_fleet(3, 3.5, num_available=2, samples=steadily(3.5, until=1300.0))
    assert decided(later, stuck, mono=1300.0).write == 5


@pytest.mark.parametrize(
    ("before", "replicas", "reason"), [(1, 3, "ScaledUp"), (3, 1, "ScaledDown"), (1, 0, "ScaledToZero")]
)
def test_a_change_whose_status_was_lost_is_the_scalers_own(before, replicas, reason):
    state = decided(make_fleet(replicas, 0.6 * replicas, writer=SCALER), settled(before), bounds=ZERO).state
    assert (state.desired, state.writer, state.reason) == (replicas, SCALER, reason)


def test_engines_that_start_are_waited_for_unless_the_load_doubles():
    rising = settled(4, starting_since="2026-01-01T00:10:00Z")
    assert decided(make_fleet(4, 4.5, num_available=1), rising).write is None
    assert decided(make_fleet(4, 0.0, num_available=1), rising).write is None
    assert decided(make_fleet(4, 5.6, num_available=1), rising).write == 8


def test_the_start_is_measured_once_all_engines_serve():
    rising = settled(4, starting_since="2026-01-01T00:10:00Z")  # 400 s ago
    found = decided(make_fleet(4, 2.0), rising)
    assert (found.state.start_seconds, found.state.starting_since) == (400, "")


@pytest.mark.parametrize(("replicas", "after"), [(12, 8), (1, 2)])
def test_a_number_outside_the_bounds_is_corrected(replicas, after):
    found = decided(make_fleet(replicas, 1.0), bounds=Bounds(least=2, most=8, idle_s=1))
    assert (found.write, found.state.reason) == (after, "Bounded")
    assert found.state.message == f"replicas {replicas} -> {after}: minReplicas 2 and maxReplicas 8 are the bounds."


def test_a_load_beyond_the_maximum_is_said():
    found = decided(make_fleet(8, 20.0))
    assert (found.write, found.state.reason) == (None, "AtMaximum")
    assert found.state.message == "The load takes more engines than maxReplicas 8: raise it, or send less."


def test_a_change_says_its_figures():
    load = make_load(1.2, queued_tokens=3000, running_tokens=500, tokens_per_second=4000, engines=1)
    found = decided(replace(make_fleet(1, 1.2), load=load))
    assert found.state.message == (
        "replicas 1 -> 2: the load takes 1.20 fully used engines (3000 tokens wait, 500 run; 4000 tokens of prompts/s)."
    )
    assert (found.state.writer, found.state.inputs.queued_tokens) == (SCALER, 3000)
    assert found.state.last_scale_time == found.state.starting_since == "2026-01-01T00:16:40Z"


def test_zero_needs_an_idle_time_and_a_held_request_wakes():
    idle = settled(1, idle_since="2026-01-01T00:06:40Z")  # 600 s ago
    announced = decided(make_fleet(1, 0.0), idle, bounds=ZERO)
    assert (announced.write, announced.state.reason, announced.state.desired) == (None, "ScalingToZero", 0)
    assert announced.state.message == "No engine has had a request for 600 s, so replicas becomes 0."
    found = decided(make_fleet(1, 0.0), announced.state, bounds=ZERO)
    assert (found.write, found.state.reason) == (0, "ScaledToZero")
    assert found.state.message == "replicas 1 -> 0: no engine has had a request for 600 s."
    late = settled(1, idle_since="2026-01-01T00:06:41Z")
    assert decided(make_fleet(1, 0.0), late, bounds=ZERO).write is None
    assert decided(make_fleet(1, 0.001), idle, bounds=ZERO).state.idle_since == ""
    asleep = settled(0, reason="ScaledToZero")
    assert decided(make_fleet(0, 0.0), asleep, bounds=ZERO).write is None
    found = decided(make_fleet(0, 2.0, held=Held(tokens=10, requests=1)), asleep, bounds=ZERO)
    assert (found.write, found.state.reason) == (3, "Woken")


@pytest.mark.parametrize(
    "held",
    [
        Held(in_flight=1),
        Held(had_requests=True),
        Held(is_complete=False),  # a gateway pod is not ready, so it may have no tokenizer
        Held(tokens=10, requests=1),
        Held(num_blind=1),
    ],
)
def test_a_service_with_requests_or_unknown_gateways_is_not_idle(held):
    idle = settled(1, idle_since="2026-01-01T00:06:40Z")
    found = decided(make_fleet(1, 0.0, held=held), idle, bounds=ZERO)
    assert (found.write, found.state.idle_since) == (None, "")


def test_an_announced_zero_is_withdrawn_by_a_request_and_is_the_scalers_own_once_it_is_there():
    announced = settled(1, desired=0, reason="ScalingToZero", idle_since="2026-01-01T00:06:40Z")
    found = decided(make_fleet(1, 0.0, held=Held(in_flight=1)), announced, bounds=ZERO)
    assert (found.write, found.state.reason, found.state.desired) == (None, "Steady", 1)
    assert decided(make_fleet(1, 2.0), announced, bounds=ZERO).write == 3
    lost = decided(make_fleet(0, 0.0), announced, bounds=ZERO).state
    assert (lost.desired, lost.writer, lost.reason) == (0, SCALER, "ScaledToZero")
    woken = decided(make_fleet(0, 0.0, held=Held(tokens=10, requests=1)), announced, bounds=ZERO)
    assert (woken.write, woken.state.reason) == (1, "Woken")


def test_requests_now_and_then_write_no_status():
    world = ScaledWorld(bounds=ZERO)
    for _ in range(40):
        world.turn(0.0)
    assert world.stored.idle_since == "2026-01-01T00:00:02Z"
    world.turn(0.0, held=Held(in_flight=1))
    before = world.stored
    assert before.idle_since == ""
    for _ in range(20):
        for held in (Held(), Held(), Held(had_requests=True)):
            world.turn(0.0, held=held)
            assert world.stored == before


def test_a_gateway_without_a_tokenizer_wakes_a_service():
    asleep = settled(0, reason="ScaledToZero")
    found = decided(make_fleet(0, 0.0, held=Held(num_blind=1, is_complete=False)), asleep, bounds=ZERO)
    assert (found.write, found.state.reason) == (1, "Woken")
    assert found.state.message == (
        "replicas 0 -> 1: a gateway pod has no tokenizer, or does not answer, so it needs an engine."
    )
    assert decided(make_fleet(0, 0.0, held=Held(is_complete=False)), asleep, bounds=ZERO).write is None


def test_a_higher_minimum_wakes_a_service():
    found = decided(make_fleet(0, 0.0), settled(0, reason="ScaledToZero"), bounds=Bounds(least=2, most=8, idle_s=600))
    assert (found.write, found.state.reason) == (2, "Bounded")


def test_a_zero_of_the_scaler_is_known_without_a_stored_state():
    own = decided(make_fleet(0, 0.0, writer=SCALER), ScalingState(), bounds=ZERO)
    assert (own.write, own.state.reason) == (None, "ScaledToZero")
    users = decided(make_fleet(0, 0.0, writer="kubectl"), ScalingState(), bounds=ZERO)
    assert (users.write, users.state.reason) == (None, "Suspended")


def test_a_service_that_a_user_suspended_is_not_woken():
    found = decided(make_fleet(0, 2.0, held=Held(tokens=10, requests=1)), bounds=ZERO)
    assert (found.write, found.state.reason) == (None, "Suspended")
    assert decided(make_fleet(0, 0.0), bounds=BOUNDS).write is None  # minReplicas 1 does not wake it either


def test_a_user_keeps_a_number_for_a_whole_window():
    world = ScaledWorld(replicas=1)
    for _ in range(60):
        world.turn(0.3)
    world.put(4, "kubectl")
    seen = world.turn(0.3)
    assert (seen.state.reason, seen.state.desired, seen.state.writer) == ("OtherWriter", 4, "kubectl")
    assert seen.state.message == "kubectl set replicas to 4. This stays until the operator's next decision."
    for _ in range(29):
        assert world.turn(0.3).write is None
    for _ in range(60):
        world.turn(0.3)
    assert [(before, after) for _, before, after, _ in world.changes] == [(4, 2), (2, 1)]


def test_a_second_autoscaler_is_named():
    found = decided(make_fleet(3, 1.0, writer="kube-controller-manager", samples=steadily(1.0, seconds=0)), settled(2))
    assert found.state.message.endswith(
        "Two autoscalers write replicas: remove the HorizontalPodAutoscaler (or KEDA's ScaledObject), or "
        "spec.autoscaling."
    )


def test_a_restart_of_the_operator_delays_a_removal_by_a_whole_window():
    world = ScaledWorld(replicas=2)
    for _ in range(20):
        world.turn(0.1)
    world.restart()
    for _ in range(28):
        assert world.turn(0.1).write is None
    for _ in range(5):
        world.turn(0.1)
    assert world.replicas == 1


def test_the_state_stays_the_same_while_nothing_happens():
    world = ScaledWorld(replicas=2)
    for _ in range(20):
        world.turn(1.0)
    before = world.stored
    for load in (0.9, 1.1, 1.0, 1.2) * 20:
        world.turn(load)
    assert world.stored == before
