"""Releases under steady streams: a bad release is rolled back with its reason, and a good release fails no request.

One service gets one release after the other. Images of bad releases are built FROM the engine's image with a patch
(disruptions/bad_images/), and the old engine keeps serving. During a good release no request fails, no stream is cut,
and the number of engine replicas does not exceed maxSurge. The last test changes the image, with two replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.load import StreamTokens, undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, Service, wait
from disruptions.model_folders import model_on_the_nodes
from disruptions.releases import CRASHES, FAILS_REQUESTS, NEXT, NEXT_VERSION, SLOW, Release, release
from disruptions.rollout_picture import plotted
from disruptions.rollout_under_load import (
    NUM_TOKENS,
    RolloutRecord,
    expect_unnoticed,
    is_rolled,
    is_rolled_back,
    roll_out,
    rollable,
)
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl

# The seconds of a hold. In this time the prober alone sends 15 requests to each of two engines. Streams add only a few
# requests, because a slow release delays later streams.
BAD_HOLD_SECONDS, BAD_MIN_REQUESTS = 30, 10
ROLLBACK_SECONDS = 60.0
# The longest time for which a release that fails requests may receive requests. On an idle machine it is 2 or 3 s.
EXPOSED_SECONDS = 30.0
# The most seconds from a change of the route label until clients' requests and the timeline show this change.
ROUTE_SECONDS = 10.0
# The hold is short, because there are three such rollouts. One stream and one probe per second give each of two engines
# ten requests in it.
HOLD_SECONDS, MIN_REQUESTS = 10, 20
# Seconds between the beginnings of a client's streams in the tests of `make e2e`. Without these pauses, streams would
# keep a core busy that new engines need for their start.
PAUSED_SECONDS = 2.0
STEPS = ("Starting", "Analyzing", "Promoting", "Complete")


@pytest.fixture(scope="module")
def rolling(operator: Kubectl) -> Iterator[tuple[Service, StreamTokens]]:
    with new_namespace(operator, "rollout") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, BAD_HOLD_SECONDS, BAD_MIN_REQUESTS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def _release(
    cluster: Cluster,
    rolling: tuple[Service, StreamTokens],
    show: Callable[[RolloutRecord], None],
    wanted: Release,
    what: str,
    reason: str,
    **settings: Any,
) -> RolloutRecord:
    """Releases the image, and waits for the rollback and its Event. Expects that the operator does not act on the old
    engine.
    """
    service, expected = rolling
    image = release(cluster, wanted)
    old = service.get()["status"]["currentRevision"]
    (kept,) = service.clusters()
    seen = roll_out(
        service,
        expected,
        what,
        lambda: service.change(engine={"image": image}),
        is_over=is_rolled_back(service, old),
        events=(f"Warning {reason}: ",),
        **settings,
    )
    show(seen)
    timeline = seen.timeline
    assert seen.untrue_times == []
    assert timeline.most_clusters <= 2
    assert service.clusters() == [kept]
    assert [touch for touch in timeline.engines[kept].touches if touch[0] >= timeline.began_at] == []
    failed_s, over_s = timeline.step_at("RollingBack"), timeline.step_at("RolledBack")
    assert failed_s is not None and over_s is not None and over_s - failed_s < ROLLBACK_SECONDS
    return seen


def _expect_reason(service: Service, reason: str, words: str) -> None:
    """Expects the reason in the condition and in `kubectl get llm`. `_release` has waited for the Event."""
    condition = service.condition("RolledBack")
    assert (condition["status"], condition["reason"]) == ("True", reason)
    assert re.search(words, condition["message"]), condition["message"]
    assert service.get()["status"]["updateRevision"] in condition["message"]
    shown = service.kubectl("get", "llm", service.name, "--namespace", service.namespace)
    assert reason in shown, shown


def test_a_release_that_fails_requests_is_taken_back_within_seconds(
    cluster: Cluster, rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    settings = {"late_every_s": PAUSED_SECONDS}
    seen = _release(cluster, rolling, show_rollout, FAILS_REQUESTS, "requests fail", "AnalysisFailed", **settings)
    plotted(seen, "rollback")
    service, _ = rolling
    _expect_reason(service, "AnalysisFailed", r"\d+ of \d+ requests failed in the new revision, 0 of \d+ in the old")
    failed = service.get()["status"]["updateRevision"]
    (engine,) = seen.timeline.of(failed)
    assert engine.routed_at is not None
    unrouted_at = next(at for at, is_routed in engine.routes if at > engine.routed_at and not is_routed)
    exposed_until = unrouted_at + ROUTE_SECONDS
    assert seen.failures, "the release got no request, and shows nothing"
    for failure in seen.failures:
        assert failure.what.startswith("HTTP 500") and not failure.is_cut, failure
        assert engine.routed_at - ROUTE_SECONDS <= failure.began <= exposed_until, failure
    assert unrouted_at - seen.failures[0].began < EXPOSED_SECONDS
    assert len(seen.failures) < seen.began_between(engine.routed_at, exposed_until), "the old engine answers meanwhile"


@pytest.mark.slow
def test_a_release_that_crashes_at_start_is_taken_back_and_nobody_notices(
    cluster: Cluster, rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    seen = _release(cluster, rolling, show_rollout, CRASHES, "crashes at start", "CrashLoop")
    assert [failure.what for failure in seen.failures] == []
    assert seen.timeline.step_at("Analyzing") is None
    _expect_reason(rolling[0], "CrashLoop", "librelease.so.2")


@pytest.mark.slow
def test_a_release_that_is_ten_times_slower_is_taken_back_and_no_request_fails(
    cluster: Cluster, rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    # The streams are short, so that they end within the time of the rollback.
    seen = _release(cluster, rolling, show_rollout, SLOW, "ten times slower", "AnalysisFailed", late_tokens=16)
    assert [failure.what for failure in seen.failures] == []
    _expect_reason(rolling[0], "AnalysisFailed", r"99 % of first tokens take more than \S+ s in the new revision")


def _roll(
    rolling: tuple[Service, StreamTokens],
    show: Callable[[RolloutRecord], None],
    what: str,
    most: int,
    late_every_s: float = 1.0,
    **spec: Any,
) -> RolloutRecord:
    """Rolls the change out, and expects no failed request and an Event for each step. `most` is replicas + maxSurge."""
    service, expected = rolling
    old = service.get()["status"]["currentRevision"]
    seen = roll_out(
        service,
        expected,
        what,
        lambda: service.change(**spec),
        is_over=is_rolled(service, old),
        events=[f" {step}:" for step in STEPS],
        late_every_s=late_every_s,
    )
    expect_unnoticed(seen, show)
    assert seen.timeline.most_clusters <= most and len(seen.timeline.sampled) > HOLD_SECONDS // 2
    new = service.get()["status"]["currentRevision"]
    assert {engine.revision for engine in seen.timeline.engines.values()} == {old, new}
    assert any(at >= seen.timeline.began_at for engine in seen.timeline.of(old) for at, _ in engine.touches)
    assert seen.early_touches(old, new) == []
    return seen


def test_a_changed_argument_is_rolled_out_and_nobody_notices(
    rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    service, _ = rolling
    engine = {"image": None, "args": {"threads": 1, "maxNumSeqs": 128}}  # replaces the image of a bad release
    analysis = {"holdSeconds": HOLD_SECONDS, "minRequests": MIN_REQUESTS}
    change = {"engine": engine, "rollout": {"analysis": analysis}}
    seen = _roll(rolling, show_rollout, "an argument", 2, PAUSED_SECONDS, **change)
    plotted(seen, "roll")
    for step in STEPS:
        assert seen.timeline.step_at(step) is not None, f"{step} was not among {seen.timeline.steps}"
    hold_s = (seen.timeline.step_at("Promoting") or 0.0) - (seen.timeline.step_at("Analyzing") or 0.0)
    # The timeline has the times at which this process read the status. On a busy machine it reads some statuses late.
    assert hold_s >= HOLD_SECONDS / 2
    assert service.condition("RolledBack")["status"] == "False"


@pytest.mark.slow
def test_the_same_weights_from_another_place_are_rolled_out_and_nobody_notices(
    rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    service, _ = rolling
    source = f"file://{model_on_the_nodes()}"
    _roll(rolling, show_rollout, "the model", 2, model={"source": source})
    assert service.get()["status"]["currentRevision"] == service.get()["status"]["updateRevision"]


@pytest.mark.slow
def test_another_image_of_two_replicas_is_rolled_out_and_nobody_notices(
    cluster: Cluster, rolling: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    service, _ = rolling
    image = release(cluster, NEXT)
    before = service.clusters()
    service.scale(2)
    wait(lambda: service.has(2), READY_SECONDS, service.story)
    assert set(before) < set(service.clusters()), "more replicas restart no engine"
    seen = _roll(rolling, show_rollout, "the image, two replicas", 3, engine={"image": image})
    (new,) = {engine.revision for engine in seen.timeline.engines.values() if engine.name in service.clusters()}
    versions = [engine.answers[-1][1]["engine_version"] for engine in seen.timeline.of(new)]
    assert versions == [NEXT_VERSION] * 2
