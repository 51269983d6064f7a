"""The samples of a load and the decisions from them, with a window of 10 s and three samples a second."""

import asyncio
from datetime import timedelta

from rayloom_operator.decide.scaling.windows import Windows
from rayloom_operator.engines.status import ReportedLoad
from rayloom_operator.observe.observed import Observed
from rayloom_operator.reconcile.gather.scaling import ScalingGatherer
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_operator import CLOCK, NOW, make_pod, make_reading, make_resolved, make_said, make_serving
from rt_scaling import planned
from rt_world import service

KEY = ("team", "chat")
SCALING = {"maxReplicas": 4}


def looks(number, *, gatherer=None, replicas=1, document=None, kube=None, begin=100.0, ttft_s=2, **load):
    """The decisions of `number` calls of the gatherer, and the gatherer."""
    gatherer = gatherer or ScalingGatherer(kube or FakeKube(), Windows(10.0), lambda: 0.0)
    resolved = make_resolved(replicas=replicas, autoscaling=SCALING | {"goal": {"ttftSeconds": ttft_s}})
    load = ReportedLoad(**{"max_running_tokens": 100, "prefill_tokens_per_second": 1000.0, **load})
    found = []
    for index in range(number):
        at = begin + index / 3
        said = make_said().model_copy(update={"load": load})
        engines = tuple(make_serving(resolved, each, reading=make_reading(said, at=at)) for each in range(replicas))
        now = Now(CLOCK + timedelta(seconds=at), at)
        looked = document or service(replicas=replicas, autoscaling=SCALING)
        seen = Observed(replicas=engines)
        found.append(
            asyncio.run(gatherer.next(KEY, looked, resolved.service.spec, seen, planned(resolved, seen, mono=NOW), now))
        )
    return found, gatherer


def test_the_first_look_decides_nothing_and_the_second_one_may():
    found, _ = looks(2, queued_tokens=5000)
    assert [each.write for each in found] == [None, 4]
    assert found[0].seen.queued_tokens == 5000


def test_held_requests_wake_a_service_at_the_rate_of_its_last_engine():
    resolved = make_resolved(
        replicas=0,
        autoscaling={"minReplicas": 0, "maxReplicas": 8, "idleSeconds": 10},
        gateway={"replicas": 1},
    )
    inputs = {"engines": 2, "tokensPerSecond": 2000}
    status = {"autoscaling": {"desiredReplicas": 0, "reason": "ScaledToZero", "inputs": inputs}}
    document = service(replicas=0) | {"status": status}
    gatherer = ScalingGatherer(FakeKube(), Windows(10.0), lambda: 0.0)

    def look(**requests):
        said = make_said("recovering", nodes=(), token_age=None, **requests)
        said = said.model_copy(update={"load": ReportedLoad(queued_tokens=1000 * requests.get("waiting", 0))})
        pod = make_pod("gateway", is_head=False)
        seen = Observed(gateways=(pod,), gateway_readings={pod.name: make_reading(said, at=NOW)})
        now = Now(CLOCK, NOW)
        return asyncio.run(
            gatherer.next(KEY, document, resolved.service.spec, seen, planned(resolved, seen, mono=NOW), now)
        )

    assert look().write is None
    # 3000 tokens take 3 s at 1000/s, and a queue may take 1 s. The load of three full engines needs five at 70 %.
    found = look(waiting=3)
    assert (found.write, found.state.reason, found.state.inputs.held_requests) == (5, "Woken", 3)
    # While the first engines start, the rate is still known.
    assert found.state.inputs.tokens_per_second == 1000


def test_samples_older_than_the_longest_window_are_dropped():
    _, gatherer = looks(300, running_tokens=50)
    # 10 s with three samples a second, and two more.
    assert len(gatherer._histories[KEY].samples) <= 34
    gatherer.forget(KEY)
    assert gatherer._histories == {}


def test_a_document_from_before_the_last_write_decides_nothing():
    kube = FakeKube()
    kube.put(service(replicas=3, autoscaling=SCALING))
    status = {"status": {"autoscaling": {"desiredReplicas": 3, "reason": "ScaledUp"}}}
    stale = service(replicas=1, autoscaling=SCALING) | status
    found, _ = looks(3, kube=kube, document=stale, queued_tokens=5000)
    assert found == [None, None, None]


def test_a_change_of_the_goal_keeps_the_samples_under_the_new_goal():
    # 1000 tokens take a second. With a goal of 2 s this is the load of one engine, and with a goal of 4 s that of half
    # an engine.
    _, gatherer = looks(30, queued_tokens=1000, running_tokens=20)
    before = [each.at for each in gatherer._histories[KEY].samples]
    looks(1, gatherer=gatherer, begin=110.0, ttft_s=4, queued_tokens=1000, running_tokens=20)
    samples = gatherer._histories[KEY].samples
    assert [each.at for each in samples] == [*before, 110.0]
    assert {round(each.engines, 6) for each in samples} == {0.7}


def test_samples_before_a_gap_are_dropped():
    _, gatherer = looks(30, running_tokens=50)
    looks(1, gatherer=gatherer, begin=200.0)
    assert [each.at for each in gatherer._histories[KEY].samples] == [200.0]
