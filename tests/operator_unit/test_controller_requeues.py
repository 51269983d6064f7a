"""The times at which the controller reconciles a service, and its treatment of unusable specs and labels."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.requeue import requeue_after_s
from rayloom_operator.kube.client import KubeError
from rayloom_operator.names import group_name
from rayloom_operator.observe.observed import Observed
from rayloom_operator.observe.poller import EnginePoller
from rayloom_operator.times import Now
from rt_fake_kube import KUBERAY
from rt_operator import (
    CLOCK,
    crashed,
    make_pod_document,
    make_reading,
    make_resolved,
    make_said,
    make_serving,
    make_situation,
)
from rt_world import SERVICE, generation, head, service, with_world

KEY = ("team", "chat")


@pytest.mark.parametrize(
    ("said", "now", "seconds"),
    [
        (make_said(), 101, 300),
        (make_said(), 130, 20),
        (make_said("recovering"), 101, 20),
        (make_said(token_age=16.0), 101, 20),
    ],
)
def test_only_a_service_that_is_well_is_left_alone_for_long(said, now, seconds):
    replicas = (make_serving(make_resolved()), make_serving(make_resolved(), 1, reading=make_reading(said)))
    situation = make_situation(observed=Observed(replicas=replicas), now=Now(CLOCK, now))

    assert requeue_after_s(situation, Plan()) == seconds


@pytest.mark.parametrize(
    ("num_failing", "silent_s", "mounting_s", "seconds"),
    [
        (1, 3.0, None, 1.0),
        (1, 7.75, None, 0.25),
        (1, 60.0, None, 1.0),
        (1600, 0.0, None, 8.0),
        (10_000, 0.0, None, 8.0),
        (10_000, 3.0, None, 5.0),
        (2000, 60.0, None, 10.0),
        # Another requeue, at its usual time, is due earlier than the requeue for the silent engine.
        (10_000, 60.0, None, 20.0),
        (10_000, 60.0, 1.0, 2.0),
        (10_000, 60.0, 61.0, 10.0),
    ],
)
def test_a_silent_engine_is_reconciled_when_it_is_unreachable_and_then_as_often_as_many_can_be(
    num_failing, silent_s, mounting_s, seconds
):
    poller = EnginePoller(lambda _: None)
    poller.num_failing = num_failing
    reading = make_reading(make_said(), at=100.0, failing_since=101.0)
    replicas = (make_serving(make_resolved()), make_serving(make_resolved(), 1, reading=reading))
    situation = make_situation(
        observed=Observed(replicas=replicas),
        now=Now(CLOCK, 101.0 + silent_s),
        mounting_s=mounting_s,
        retry_interval_s=poller.retry_interval_s(),
    )

    assert requeue_after_s(situation, Plan()) == seconds


def test_an_engine_that_does_not_answer_has_its_service_reconciled(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.controller._SILENCE_CHECK_S", 0.001)

    async def story(world):
        looked_at = asyncio.Event()
        monkeypatch.setattr(world.controller._poller, "silent", lambda since: [KEY])
        monkeypatch.setattr(world.controller._reconciler._observer, "forget", lambda key, clock: looked_at.set())
        async with asyncio.timeout(60):
            await looked_at.wait()

    with_world(story)


def test_over_a_spec_that_cannot_be_read_no_pod_is_taken_by_force():
    async def story(world):
        world.ask_for(service(recovery={"nodeLossSeconds": 3600}))
        await world.until(lambda: world.kube.named("RayCluster"))
        world.kube.put(head(world.kube))
        world.ask_for(service(recovery={"nodeLossSeconds": 3600}, replicas="many") | generation(2))
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        since = (datetime.now(UTC) - timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": since}
        meta = {"name": "n1", "namespace": ""}
        world.kube.put({"apiVersion": "v1", "kind": "Node", "metadata": meta, "status": {"conditions": [ready]}})
        await world.until(lambda: world.controller.watches.nodes.unready)
        await world.rest()
        assert ("delete", "/api/v1/namespaces/team/pods/head") not in world.kube.calls

    with_world(story)


def test_an_engine_that_failed_makes_no_haste_while_there_is_no_kuberay():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        failed = head(world.kube)
        failed["status"] = make_pod_document(engine=crashed(70, "ranks died"))["status"] | {"podIP": ""}
        world.kube.remove(KUBERAY)
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        world.kube.put(failed)
        await world.until(lambda: world.kube.statuses[-1]["groups"][0]["restarts"] == 1)
        await world.rest()
        assert await world.controller._reconcile(KEY) >= 20

    with_world(story)


@pytest.mark.parametrize("label", [{}, {"rayloom.dev/revision": "ffffffff"}])
def test_the_revision_of_an_engine_is_no_matter_of_a_label(label):
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        path = world.kube.path("RayCluster")
        cluster = world.kube.objects[path]
        kept = {name: text for name, text in cluster["metadata"]["labels"].items() if name != "rayloom.dev/revision"}
        world.kube.calls.clear()
        world.kube.put(cluster | {"metadata": cluster["metadata"] | {"labels": kept | label}})
        cached = world.controller.watches.clusters.of_service
        await world.until(lambda: cached(KEY)[0]["metadata"]["labels"] == kept | label)
        await world.rest()
        await world.controller._reconcile(KEY)
        assert [call for call in world.kube.calls if call[0] == "delete"] == []

    with_world(story)


def test_a_refused_service_waits_for_its_engines_first_answer_too(monkeypatch):
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        monkeypatch.setattr(world.controller._poller, "follow", lambda *_: None)
        asked = head(world.kube)
        asked["status"]["podIP"] = "10.0.0.1"
        world.kube.put(asked)
        await world.until(lambda: world.controller.watches.pods.of_service(KEY))
        await world.rest()
        world.kube.statuses.clear()
        world.kube.refusals["apply", "chat-rayloom"] = KubeError(403, "no")
        world.kube.calls.clear()
        world.controller._reconciler._applier.forget(KEY)
        world.ask_for(service() | generation(2))
        await world.rest()
        assert (world.kube.statuses, world.kube.calls) == ([], [])

    with_world(story)


def test_the_observation_of_a_service_is_of_one_moment():
    async def story(world):
        meta = {"name": group_name("chat", "00000000"), "namespace": "team", "labels": {"rayloom.dev/service": "chat"}}
        cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta}
        meta["ownerReferences"] = [{"uid": "uid-1"}]
        world.kube.put(cluster)
        pod = head(world.kube)
        pod["spec"]["volumes"] = [{"name": "model"}]
        world.kube.put(pod)
        clusters, pods = world.controller.watches.clusters, world.controller.watches.pods
        await world.until(lambda: clusters.of_service(KEY) and pods.of_service(KEY))

        async def list_events(path, params):
            assert path.endswith("/events")
            world.kube.remove(world.kube.path("RayCluster"))
            world.kube.remove(world.kube.path("Pod"))
            await world.until(lambda: not clusters.of_service(KEY) and not pods.of_service(KEY))
            return [], "1"

        world.kube.list = list_events
        seen = await world.controller._reconciler._observer.observe(
            KEY, "uid-1", (), timedelta(seconds=15), datetime.now(UTC)
        )
        assert (seen.replicas, seen.terminating_pods) == ((), ())

    with_world(story, leads=asyncio.Event())


def test_the_operators_own_status_write_is_no_event():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        queued = []
        world.controller._queue.add = lambda key, **_: queued.append(key)
        world.controller.set_service(world.kube.objects[SERVICE], False)
        assert queued == []
        world.ask_for(world.kube.objects[SERVICE])
        assert queued == [KEY]

    with_world(story)


@pytest.mark.parametrize(
    ("refusal", "accepted"),
    [
        (KubeError(404, "not found"), "Valid"),
        (KubeError(422, 'Pod "head" is invalid: metadata.uid: Invalid value: "1": field is immutable'), "Valid"),
        (KubeError(403, "a webhook denied the request: metadata.uid, metadata.labels"), "ApplyRefused"),
    ],
)
def test_a_pod_that_went_while_it_was_routed_to_is_no_refusal(refusal, accepted):
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        world.kube.refusals["patch", "/pods/head"] = refusal
        gone = head(world.kube)
        gone["metadata"]["labels"]["rayloom.dev/route"] = "true"
        world.kube.put(gone)
        await world.until(lambda: ("patch", "/api/v1/namespaces/team/pods/head") in world.kube.calls)
        await world.rest()
        assert world.reason("Accepted") == accepted

    with_world(story)


def test_a_decision_that_may_not_be_written_yet_is_not_reconciled_again_before_it_may(monkeypatch):
    """An engine whose answers always differ exhausts the pace of writes. Its service must not occupy the event loop."""

    async def story(world):
        await world.rest()
        monkeypatch.setattr("rayloom_operator.reconcile.write_pace._BURST", 0.0)
        document = world.kube.put(service())
        again_s = await world.controller._reconciler.reconcile(("team", "chat"), document)
        assert world.kube.statuses == []
        assert 0.4 < again_s <= 0.5

    with_world(story)
