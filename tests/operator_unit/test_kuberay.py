"""The supported KubeRay versions. Without KubeRay, objects of services stay, and the status has the reason."""

import asyncio

import pytest

from rayloom_operator.kube import reflector
from rayloom_operator.kube.client import KubeError
from rayloom_operator.observe.kuberay import problem, slim
from rt_fake_kube import KUBERAY, make_definition
from rt_world import CLIENT_SERVICE, service, with_world

ACCOUNTS = "/api/v1/namespaces/team/serviceaccounts"
UNKNOWN = KubeError(404, "the server could not find the requested resource")


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (make_definition(), ""),
        (make_definition(versions=("v1", "v1alpha1")), ""),
        (None, "The cluster has no KubeRay: there is no CustomResourceDefinition rayclusters.ray.io. "),
        (
            make_definition(versions=("v1alpha1",)),
            "The cluster's KubeRay is too old: rayclusters.ray.io does not serve v1. ",
        ),
        (
            make_definition("authOptions"),
            "The cluster's KubeRay is too old: rayclusters.ray.io has no spec.authOptions.mode. ",
        ),
        (
            make_definition("secretName"),
            "The cluster's KubeRay is too old: rayclusters.ray.io has no spec.authOptions.secretName. ",
        ),
        (
            make_definition("rayStartParams"),
            "The cluster's KubeRay is too old: rayclusters.ray.io has no spec.headGroupSpec.rayStartParams. ",
        ),
        (
            {
                **make_definition(),
                "metadata": {"name": "rayclusters.ray.io", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            },
            "KubeRay is being removed from the cluster: rayclusters.ray.io is terminating. ",
        ),
    ],
    ids=["1.6", "two versions", "none", "v1alpha1 only", "1.5.0", "1.5.1", "a field less", "on its way out"],
)
def test_the_definition_shows_whether_kuberay_can_be_used(definition, says):
    cure = "Install KubeRay 1.6 or newer, with its definitions (Helm does not update those)."
    assert problem(definition) == (says + cure if says else "")


def test_a_definition_without_schema_is_too_old():
    definition = make_definition()
    del definition["spec"]["versions"][0]["schema"]
    assert "too old" in slim(definition)["problem"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(reflector, "_UNKNOWN_DELAY_S", 0.01)
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("rayloom_operator.reconcile.reconciler._SOON_S", 0.01)


def without_kuberay(kube):
    kube.refusals["list", "/rayclusters"] = UNKNOWN
    if KUBERAY in kube.objects:
        kube.remove(KUBERAY)
    kube.end_watches("/rayclusters", UNKNOWN)


def with_kuberay(kube, definition=None):
    kube.refusals.clear()
    kube.put(definition or make_definition())


def test_services_of_a_cluster_without_kuberay_report_it_and_start_once_it_is_installed():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        await world.rest()
        assert world.reason("Available") == "UnsupportedKubeRay"
        assert "there is no CustomResourceDefinition rayclusters.ray.io" in world.message()
        assert {verb for verb, _ in world.kube.calls} == {"patch", "create"}  # the status and its Event
        assert CLIENT_SERVICE not in world.kube.objects
        with_kuberay(world.kube)
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.until(lambda: world.reason("Accepted") == "Valid")

    with_world(story, prepare=without_kuberay)


def test_services_of_an_old_kuberay_report_it_and_start_once_it_is_new_enough():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        await world.rest()
        assert (world.kube.named("RayCluster"), "too old" in world.message()) == ([], True)
        with_kuberay(world.kube)
        await world.until(lambda: world.kube.named("RayCluster"))

    with_world(story, prepare=lambda kube: kube.put(make_definition("secretName")))


def test_engine_replicas_are_neither_deleted_nor_recreated_while_kuberay_is_removed():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        cluster = world.kube.path("RayCluster")
        made = dict(world.kube.objects)
        world.kube.calls.clear()
        without_kuberay(world.kube)
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        assert "no KubeRay" in world.message()
        changed = service(engine={"args": {"threads": 2}})
        changed["metadata"]["generation"] = 2
        world.ask_for(changed | {"status": world.kube.statuses[-1]})
        await world.rest()
        calls = [call for call in world.kube.calls if "llmservices" not in call[1] and "/events/" not in call[1]]
        # Without a plan, evictions are not blocked.
        assert [(verb, path.split("/")[-2]) for verb, path in calls] == [("apply", "poddisruptionbudgets")]
        # No event reports the end of the RayCluster. So the RayCluster counts as existing until its kind is known
        # again.
        assert (
            world.controller.watches.clusters.of_service(("team", "chat"))[0]["metadata"]["uid"]
            == (made[cluster]["metadata"]["uid"])
        )

    with_world(story)


def test_engine_replicas_are_recreated_once_kuberay_is_back():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        cluster = world.kube.path("RayCluster")
        without_kuberay(world.kube)
        await world.until(lambda: not world.controller.watches.clusters.is_synced.is_set())
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        # The API server deletes a definition's objects together with the definition.
        del world.kube.objects[cluster]
        with_kuberay(world.kube)
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.until(lambda: world.reason("Accepted") == "Valid")

    with_world(story)


def test_a_kind_that_is_known_again_is_listed_before_a_reconcile():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")
        await world.rest()
        # The definition exists, but the API server does not serve its kind yet.
        world.kube.put(make_definition())
        world.kube.calls.clear()
        before = world.kube.lists.count("/apis/ray.io/v1/rayclusters")
        await world.until(lambda: world.kube.lists.count("/apis/ray.io/v1/rayclusters") > before + 3)
        assert world.kube.calls == []
        world.kube.refusals.clear()
        await world.until(lambda: world.kube.named("RayCluster"))

    with_world(story, prepare=without_kuberay)


def test_a_change_of_kuberay_ends_the_delay_after_failures(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.work_queue._FIRST_RETRY_S", 1000.0)

    async def story(world):
        world.kube.refusals["apply", "chat-rayloom"] = KubeError(500, "later")
        world.ask_for(service())
        await world.until(lambda: ("apply", f"{ACCOUNTS}/chat-rayloom") in world.kube.calls)
        await world.rest()
        without_kuberay(world.kube)
        await world.until(lambda: world.reason("Accepted") == "UnsupportedKubeRay")

    with_world(story)


def test_a_standby_changes_nothing_and_takes_services_once_it_leads():
    async def story(world):
        world.kube.put(service())
        labels = {"rayloom.dev/service": "chat"}
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "j", "namespace": "team", "labels": labels},
        }
        world.kube.put(job)
        await world.until(lambda: world.controller.watches.jobs.of_service(("team", "chat")))
        assert (world.controller._queue.depth, world.controller.is_ready.is_set()) == (0, False)
        world.leads.set()
        await world.controller.is_ready.wait()
        assert world.kube.calls == []
        # Only now kopf starts, and reports the service that the former leader has left.
        world.controller.set_service(world.kube.put(service(drainSeconds=31)), False)
        await world.until(lambda: world.reason("Accepted") == "Valid")
        assert {each["observedGeneration"] for each in world.kube.statuses} == {2}

    with_world(story, leads=asyncio.Event())
