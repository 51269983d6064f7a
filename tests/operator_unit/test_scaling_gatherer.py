"""The samples of a load, and the decision about them: with a window of 10 s, a look each third of a second."""

import asyncio
from datetime import timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.scaling.windows import Windows
from rayloom_operator.engines.status import ReportedLoad
from rayloom_operator.observe.observed import Observed
from rayloom_operator.reconcile.gather.scaling import ScalingGatherer
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_operator import CLOCK, make_reading, make_resolved, make_said, make_serving
from rt_world import service

KEY = ("team", "chat")
REST = Step(state=RolloutState(step="Complete"), is_stored=True, message="")
SCALING = {"maxReplicas": 4}


def looks(number, *, gatherer=None, replicas=1, document=None, kube=None, begin=100.0, **load):
    """The decisions of `number` reconciles, and the gatherer."""
    gatherer = gatherer or ScalingGatherer(kube or FakeKube(), Windows(10.0), lambda: 0.0)
    resolved = make_resolved(replicas=replicas, autoscaling=SCALING)
    load = ReportedLoad(**{"max_running_tokens": 100, "prefill_tokens_per_second": 1000.0, **load})
    found = []
    for index in range(number):
        at = begin + index / 3
        said = make_said().model_copy(update={"load": load})
        engines = tuple(make_serving(resolved, each, reading=make_reading(said, at=at)) for each in range(replicas))
        now = Now(CLOCK + timedelta(seconds=at), at)
        looked = document or service(replicas=replicas, autoscaling=SCALING)
        found.append(asyncio.run(gatherer.next(KEY, looked, resolved, Observed(replicas=engines), REST, now)))
    return found, gatherer


def test_the_first_look_decides_nothing_and_the_second_one_may():
    found, _ = looks(2, queued_tokens=5000)
    assert [each.write for each in found] == [None, 4]
    assert found[0].seen.queued_tokens == 5000


def test_samples_older_than_the_longest_window_are_dropped():
    _, gatherer = looks(300, running_tokens=50)
    # 10 s with three looks a second, and two more.
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


def test_samples_before_a_gap_are_dropped():
    _, gatherer = looks(30, running_tokens=50)
    looks(1, gatherer=gatherer, begin=200.0)
    assert [each.at for each in gatherer._histories[KEY].samples] == [200.0]
