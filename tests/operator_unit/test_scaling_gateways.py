"""The requests in gateways that the scaler finds in the answers of the gateway pods."""

from dataclasses import replace

import pytest

from rayloom_operator.decide.scaling.gateways import can_hold, ended_requests, held_in
from rayloom_operator.decide.scaling.load import Held
from rayloom_operator.engines.status import ReportedLoad, absent_model
from rayloom_operator.observe.observed import Observed, ServingGateway
from rt_operator import NOW, make_pod, make_reading, make_said, make_service


def said(state="serving", *, tokens=0, uptime=100.0, **requests):
    load = ReportedLoad(queued_tokens=tokens)
    status = make_said(state, nodes=(), token_age=None, **requests)
    return status.model_copy(update={"load": load, "uptime_seconds": uptime})


def seen(*readings, ready=None):
    pods = tuple(
        replace(make_pod(f"chat-gateway-{index}", is_head=False), is_ready=ready is None or index in ready)
        for index in range(len(readings))
    )
    found = {pod.name: reading for pod, reading in zip(pods, readings, strict=True) if reading is not None}
    return Observed(gateways=pods, gateway_readings=found)


QUIET = make_reading(said())


def held(*readings, wanted=2, ready=None):
    observed = seen(*readings, ready=ready)
    return held_in(observed, wanted, ended_requests(observed), NOW)


def test_the_requests_of_all_gateways_are_added():
    waiting = make_reading(said(tokens=700, waiting=2, in_flight=3))
    streaming = make_reading(said(in_flight=1))
    assert held(waiting, streaming) == Held(tokens=700, requests=2, in_flight=4)
    assert held(QUIET, QUIET).is_idle


@pytest.mark.parametrize(
    ("readings", "ready"),
    [
        ((QUIET,), None),  # the second pod does not exist yet
        ((QUIET, QUIET), {0}),  # the second pod is not ready
        ((QUIET, None), None),
        ((QUIET, make_reading(said(), failing_since=NOW - 1)), None),
        ((QUIET, make_reading(said(), at=NOW - 70)), None),
        ((QUIET, make_reading(said("starting", uptime=1.0))), {0}),
        ((QUIET, QUIET, QUIET), {0, 1}),  # a rolling update of the pods
    ],
)
def test_gateways_that_are_not_all_ready_and_known_keep_the_last_engine_and_wake_none(readings, ready):
    found = held(*readings, ready=ready)
    assert (found.is_complete, found.is_idle, found.wakes) == (False, False, False)


@pytest.mark.parametrize(
    ("reading", "ready"),
    [
        (make_reading(said("starting", uptime=6.0)), {0}),  # a recreated pod has lost its tokenizer
        (make_reading(said(), failing_since=NOW - 61), None),  # the pod may hold requests that nobody sees
    ],
)
def test_a_gateway_without_a_tokenizer_or_without_an_answer_needs_an_engine(reading, ready):
    found = held(QUIET, reading, ready=ready)
    assert (found.num_blind, found.wakes, found.is_complete) == (1, True, False)


def through(*readings, own=(), wanted=0, ready=None, replicas=1):
    """The requests that the pods of an LLMGateway hold, in addition to the service's own gateway pods."""
    pods = tuple(
        replace(make_pod(f"public-llmgateway-{index}", is_head=False), is_ready=ready is None or index in ready)
        for index in range(len(readings))
    )
    mine = seen(*own)
    public = ServingGateway(name="public", uid="uid-public", model="chat", replicas=replicas, pods=pods)
    found = {pod.name: reading for pod, reading in zip(pods, readings, strict=True) if reading is not None}
    observed = replace(mine, llmgateways=(public,), gateway_readings={**mine.gateway_readings, **found})
    return held_in(observed, wanted, ended_requests(observed), NOW)


ABSENT = make_reading(absent_model())


def test_the_requests_at_llmgateways_are_added_to_those_of_the_services_own_gateways():
    waiting = make_reading(said(tokens=700, waiting=2, in_flight=3))
    assert through(waiting, own=(QUIET,), wanted=1) == Held(tokens=700, requests=2, in_flight=3)
    assert through(waiting).wakes
    assert through(QUIET, QUIET).is_idle
    assert through(QUIET, own=(waiting,), wanted=1).requests == 2


def test_an_llmgateway_that_does_not_know_the_name_yet_neither_keeps_an_engine_nor_wakes_one():
    assert through(ABSENT, QUIET).is_idle
    assert through(QUIET, make_reading(said("starting", uptime=1.0)), ready={0}).is_idle  # the pod gets no requests yet


@pytest.mark.parametrize(
    ("reading", "wakes"),
    [
        (None, False),
        (make_reading(said(), failing_since=NOW - 1), False),
        (make_reading(said("starting", uptime=1.0)), False),
        (make_reading(said("starting", uptime=6.0)), True),
        (make_reading(said(), failing_since=NOW - 61), True),
    ],
)
def test_a_ready_pod_of_an_llmgateway_without_a_tokenizer_or_an_answer_keeps_the_last_engine(reading, wakes):
    found = through(QUIET, reading)
    assert (found.is_complete, found.wakes) == (False, wakes)


def test_while_llmgateways_are_not_all_known_the_last_engine_stays():
    observed = replace(seen(QUIET), llmgateways=None)
    found = held_in(observed, 1, ended_requests(observed), NOW)
    assert (found.is_complete, found.wakes) == (False, False)


def test_the_last_engine_needs_gateway_pods_of_the_service_or_of_an_llmgateway():
    public = ServingGateway(name="public", uid="uid-public", model="chat", replicas=1)
    off = make_service(gateway={"replicas": 0}).spec
    assert can_hold(make_service(gateway={"replicas": 1}).spec, Observed())
    assert can_hold(off, Observed(llmgateways=(public,)))
    assert can_hold(off, Observed(llmgateways=None))
    assert not can_hold(off, Observed(llmgateways=(replace(public, replicas=0),)))
    assert not can_hold(off, Observed())


def test_requests_between_two_looks_count():
    before = seen(make_reading(said(finished=5)), make_reading(said(finished=1)))
    after = seen(make_reading(said(finished=6)), make_reading(said(finished=1)))
    assert not held_in(before, 2, ended_requests(before), NOW).had_requests
    assert held_in(after, 2, ended_requests(before), NOW).had_requests
    assert held_in(after, 2, None, NOW).had_requests  # the operator has restarted
