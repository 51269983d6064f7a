"""Releases under steady streams: a bad one is taken back by itself and says why; of a good one nobody notices anything.

One service gets one after the other. The images of the bad ones are built FROM the engine's with a change in them
(bad_images/); each time the old engine serves on. Of the good ones no request fails, none is cut, and there are no more
engines than it may have; the change of its image comes last, with two replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import Said, undisturbed
from clients.namespaces import new_namespace
from clients.service import Service, wait
from disruptions.model_folders import model_on_the_nodes
from disruptions.releases import CRASHES, FAILS_REQUESTS, NEXT, NEXT_VERSION, SLOW, Release, release
from disruptions.rollout_picture import plotted
from disruptions.rollout_under_load import NUM_TOKENS, Roll, expect_unnoticed, is_rolled, is_rolled_back, roll, rollable
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl

# The prober's requests alone are 15 for each of two engines in this time. Those of a slow release hold up the streams
# that would follow them.
BAD_HOLD_SECONDS, BAD_MIN_REQUESTS = 30, 10
ROLLBACK_SECONDS = 60.0
# For so long a release may get requests that fails them.
EXPOSED_SECONDS = 10.0
# Short, for there are three of them. With a request and a probe a second two engines get ten each in this time.
HOLD_SECONDS, MIN_REQUESTS = 10, 20


@pytest.fixture(scope="module")
def rolling(operator: Kubectl) -> Iterator[tuple[Service, Said]]:
    with new_namespace(operator, "rollout") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, BAD_HOLD_SECONDS, BAD_MIN_REQUESTS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def _release(
    cluster: Cluster,
    rolling: tuple[Service, Said],
    show: Callable[[Roll], None],
    wanted: Release,
    what: str,
    **settings: Any,
) -> Roll:
    """Releases the image and waits until it was taken back. The old engine is to be untouched by all of it."""
    service, expected = rolling
    image = release(cluster, wanted)
    old = service.get()["status"]["currentRevision"]
    (kept,) = service.clusters()
    is_over = is_rolled_back(service, old)
    seen = roll(service, expected, what, lambda: service.change(engine={"image": image}), is_over=is_over, **settings)
    show(seen)
    timeline = seen.timeline
    assert seen.lies == []
    assert timeline.most_clusters <= 2
    assert service.clusters() == [kept]
    assert [touch for touch in timeline.engines[kept].touches if touch[0] >= timeline.began_at] == []
    failed_s, over_s = timeline.step_at("RollingBack"), timeline.step_at("RolledBack")
    assert failed_s is not None and over_s is not None and over_s - failed_s < ROLLBACK_SECONDS
    return seen


def _expect_reason(service: Service, seen: Roll, reason: str, words: str) -> None:
    """Condition, Event and `kubectl get llm` say why."""
    condition = service.condition("RolledBack")
    assert (condition["status"], condition["reason"]) == ("True", reason)
    assert re.search(words, condition["message"]), condition["message"]
    assert service.get()["status"]["updateRevision"] in condition["message"]
    assert seen.timeline.first("event", f"Warning {reason}: ") is not None, seen.timeline.table()
    shown = service.kubectl("get", "llm", service.name, "--namespace", service.namespace)
    assert reason in shown, shown


def test_a_release_that_fails_requests_is_taken_back_within_seconds(
    cluster: Cluster, rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    seen = _release(cluster, rolling, show_roll, FAILS_REQUESTS, "requests fail")
    plotted(seen, "rollback")
    service, _ = rolling
    _expect_reason(
        service, seen, "AnalysisFailed", r"\d+ of \d+ requests failed in the new revision, 0 of \d+ in the old"
    )
    failed = service.get()["status"]["updateRevision"]
    (engine,) = seen.timeline.of(failed)
    assert engine.routed_at is not None
    exposed_until = engine.routed_at + EXPOSED_SECONDS
    assert seen.failures, "the release got no request, and shows nothing"
    for failure in seen.failures:
        assert failure.what.startswith("HTTP 500") and not failure.is_cut, failure
        assert engine.routed_at - 1.0 <= failure.began <= exposed_until, failure
    # One of two engines: half of what was sent meanwhile is its share.
    assert len(seen.failures) <= seen.began_between(engine.routed_at, exposed_until) / 2


@pytest.mark.slow
def test_a_release_that_crashes_at_start_is_taken_back_and_nobody_notices(
    cluster: Cluster, rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    seen = _release(cluster, rolling, show_roll, CRASHES, "crashes at start")
    assert [failure.what for failure in seen.failures] == []
    assert seen.timeline.step_at("Analyzing") is None
    _expect_reason(rolling[0], seen, "CrashLoop", "librelease.so.2")


@pytest.mark.slow
def test_a_release_that_is_ten_times_slower_is_taken_back_and_no_request_fails(
    cluster: Cluster, rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    # What it has begun is to end within the time that a rollback may take.
    seen = _release(cluster, rolling, show_roll, SLOW, "ten times slower", late_tokens=16)
    assert [failure.what for failure in seen.failures] == []
    _expect_reason(rolling[0], seen, "AnalysisFailed", r"99 % of first tokens take more than \S+ s in the new revision")


def _roll(rolling: tuple[Service, Said], show: Callable[[Roll], None], what: str, most: int, **spec: Any) -> Roll:
    """Makes the change and expects that nobody noticed. `most` is replicas + maxSurge."""
    service, expected = rolling
    old = service.get()["status"]["currentRevision"]
    seen = roll(service, expected, what, lambda: service.change(**spec), is_over=is_rolled(service, old))
    expect_unnoticed(seen, show)
    assert seen.timeline.most_clusters <= most and len(seen.timeline.sampled) > HOLD_SECONDS // 2
    new = service.get()["status"]["currentRevision"]
    assert {engine.revision for engine in seen.timeline.engines.values()} == {old, new}
    assert any(at >= seen.timeline.began_at for engine in seen.timeline.of(old) for at, _ in engine.touches)
    assert seen.early_touches(old, new) == []
    return seen


def test_a_changed_argument_is_rolled_out_and_nobody_notices(
    rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    engine = {"image": None, "args": {"threads": 1, "maxNumSeqs": 128}}  # the image may be that of a bad release
    analysis = {"holdSeconds": HOLD_SECONDS, "minRequests": MIN_REQUESTS}
    seen = _roll(rolling, show_roll, "an argument", 2, engine=engine, rollout={"analysis": analysis})
    plotted(seen, "roll")
    for step in ("Starting", "Analyzing", "Promoting", "Complete"):
        assert seen.timeline.step_at(step) is not None, f"{step} was not among {seen.timeline.steps}"
        assert seen.timeline.first("event", f" {step}:") is not None
    hold_s = (seen.timeline.step_at("Promoting") or 0.0) - (seen.timeline.step_at("Analyzing") or 0.0)
    assert hold_s >= HOLD_SECONDS - 1.0
    assert service.condition("RolledBack")["status"] == "False"


@pytest.mark.slow
def test_the_same_weights_from_another_place_are_rolled_out_and_nobody_notices(
    rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    source = f"file://{model_on_the_nodes()}"
    _roll(rolling, show_roll, "the model", 2, model={"source": source})
    assert service.get()["status"]["currentRevision"] == service.get()["status"]["updateRevision"]


@pytest.mark.slow
def test_another_image_of_two_replicas_is_rolled_out_and_nobody_notices(
    cluster: Cluster, rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    image = release(cluster, NEXT)
    before = service.clusters()
    service.scale(2)
    wait(lambda: service.has(2), 120.0, service.story)
    assert set(before) < set(service.clusters()), "more replicas restart no engine"
    seen = _roll(rolling, show_roll, "the image, two replicas", 3, engine={"image": image})
    (new,) = {engine.revision for engine in seen.timeline.engines.values() if engine.name in service.clusters()}
    versions = [engine.answers[-1][1]["engine_version"] for engine in seen.timeline.of(new)]
    assert versions == [NEXT_VERSION] * 2
