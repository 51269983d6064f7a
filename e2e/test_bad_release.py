"""Releases that are no good, under steady streams: each is taken back by itself, and says why.

The images are built FROM the engine's with a change in them: bad_images/. One service gets one after the other; each
time the old engine serves on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from plot import plotted
from release_images import CRASHES, FAILS_REQUESTS, SLOW, Release, release
from roll import NUM_TOKENS, Roll, is_rolled_back, roll, rollable
from service import Service
from streams import Said, undisturbed

# The prober's requests alone are 15 for each of two engines in this time. Those of a slow release hold up the streams
# that would follow them.
HOLD_SECONDS, MIN_REQUESTS = 30, 10
ROLLBACK_SECONDS = 60.0
# For so long a release may get requests that fails them.
EXPOSED_SECONDS = 10.0


@pytest.fixture(scope="module")
def serving(operator: Kubectl) -> Iterator[tuple[Service, Said]]:
    with new_namespace(operator, "release") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, HOLD_SECONDS, MIN_REQUESTS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def _release(
    cluster: Cluster,
    serving: tuple[Service, Said],
    show: Callable[[Roll], None],
    wanted: Release,
    what: str,
    **settings: Any,
) -> Roll:
    """Releases the image and waits until it was taken back. The old engine is to be untouched by all of it."""
    service, expected = serving
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
    cluster: Cluster, serving: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    seen = _release(cluster, serving, show_roll, FAILS_REQUESTS, "requests fail")
    plotted(seen, "rollback")
    service, _ = serving
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
    cluster: Cluster, serving: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    seen = _release(cluster, serving, show_roll, CRASHES, "crashes at start")
    assert [failure.what for failure in seen.failures] == []
    assert seen.timeline.step_at("Analyzing") is None
    _expect_reason(serving[0], seen, "CrashLoop", "librelease.so.2")


@pytest.mark.slow
def test_a_release_that_is_ten_times_slower_is_taken_back_and_no_request_fails(
    cluster: Cluster, serving: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    # What it has begun is to end within the time that a rollback may take.
    seen = _release(cluster, serving, show_roll, SLOW, "ten times slower", late_tokens=16)
    assert [failure.what for failure in seen.failures] == []
    _expect_reason(serving[0], seen, "AnalysisFailed", r"99 % of first tokens take more than \S+ s in the new revision")
