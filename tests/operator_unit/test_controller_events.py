"""The controller if events are late, in pages or missing, and if somebody else changes objects."""

import asyncio

import pytest

from rayloom_operator.kube.client import KubeError
from rayloom_operator.reconcile.missed_deletions import MissedDeletions
from rt_fake_kube import FakeKube
from rt_world import CLIENT_SERVICE, SERVICE, generation, service, with_world

KEY = ("team", "chat")
SERVICES = "/apis/rayloom.dev/v1alpha1/llmservices"
CLUSTERS = "/apis/ray.io/v1/namespaces/team/rayclusters"


def named(name, uid=""):
    document = service()
    document["metadata"] |= {"name": name, "uid": uid or f"uid-{name}"}
    return document


def test_a_spec_that_was_edited_during_a_status_write_is_reconciled():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        edits, replace = [], world.kube.replace_status

        async def replace_after_the_edit(manifest):
            if not edits:
                edited = world.kube.objects[SERVICE] | service(drainSeconds=31) | generation(2)
                edits.append(world.kube.put(edited))
            return await replace(manifest)

        world.kube.replace_status = replace_after_the_edit
        world.ask_for(service())
        await world.until(lambda: edits and world.kube.objects[SERVICE] != edits[0])
        world.controller.set_service(edits[0], False)
        await world.until(lambda: world.kube.statuses[-1]["observedGeneration"] == 2)

    with_world(story)


def test_a_recreated_service_without_an_event_gets_a_status_of_its_own_at_once():
    async def story(world):
        world.ask_for(service(replicas=2))
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        old = world.kube.objects.pop(SERVICE)
        del world.kube.objects[CLIENT_SERVICE]
        made = world.kube.put(service(uid="uid-2"))
        world.kube.statuses.clear()
        # This event is of the old service. It causes a reconcile that writes a status.
        edited = old | service(replicas=3) | {"metadata": old["metadata"] | {"generation": 2, "resourceVersion": "999"}}
        world.controller.set_service(edited, False)
        await world.until(lambda: world.kube.statuses)
        await world.rest()
        assert [each["ready"] for each in world.kube.statuses] == ["0/1"] * len(world.kube.statuses)
        assert world.controller._services.mark(("team", "chat")).uid == made["metadata"]["uid"] == "uid-2"

    with_world(story)


def test_a_service_deleted_while_names_are_listed_stays_deleted():
    async def story(world):
        for name in ("first", "second"):
            document = world.kube.put(named(name))
            world.controller.set_service(document, False)
        await world.rest()
        gone = "/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices/second"

        def turn_page(path):
            document = world.kube.objects[gone]
            world.kube.remove(gone)
            world.controller.set_service(document, True)

        world.kube.page_size, world.kube.turn_page = 1, turn_page
        await world.controller.missed_deletions.compare()
        assert [name for _, name in world.controller._services] == ["first"]
        # A recreated service counts as another service.
        world.controller.set_service(world.kube.put(named("second")), False)
        assert len(world.controller._services) == 2

    with_world(story)


def test_a_deletion_after_its_page_was_read_is_found_when_the_list_begins_again(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.missed_deletions._RETRY_S", 0.001)

    async def story(world):
        for name in ("first", "second"):
            world.controller.set_service(world.kube.put(named(name)), False)
        await world.rest()
        errors = [KubeError(410, "The provided continue parameter is too old")]

        def turn_page(path):
            world.kube.objects.pop("/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices/first", None)
            if errors:
                raise errors.pop()

        world.kube.lists.clear()
        world.kube.page_size, world.kube.turn_page = 1, turn_page
        await world.controller.missed_deletions.compare()
        assert world.kube.lists.count(SERVICES) == 2
        assert [name for _, name in world.controller._services] == ["second"]

    with_world(story)


def test_a_service_deleted_between_the_first_lists_is_found_long_before_the_regular_comparison(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.missed_deletions._FIRST_S", 0.001)

    async def run():
        found = asyncio.get_running_loop().create_future()
        missed = MissedDeletions(FakeKube(), (), lambda: {KEY: "uid-1"}, lambda *gone: found.set_result(gone))
        work = asyncio.create_task(missed.run())
        assert await asyncio.wait_for(found, 60) == (KEY, "uid-1")
        work.cancel()

    asyncio.run(run())


def test_a_service_recreated_after_its_page_was_read_stays():
    async def story(world):
        for name in ("first", "second"):
            world.controller.set_service(world.kube.put(named(name)), False)
        await world.rest()
        path = "/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices/first"

        def turn_page(_):
            world.controller.set_service(world.kube.put(named("first", "uid-again")), False)

        real = world.kube.objects.pop(path)
        world.kube.page_size, world.kube.turn_page = 1, turn_page
        world.kube.put(named("third"))
        await world.controller.missed_deletions.compare()
        assert real["metadata"]["resourceVersion"] != world.kube.objects[path]["metadata"]["resourceVersion"]
        # kopf reports the third service itself.
        assert sorted(name for _, name in world.controller._services) == ["first", "second"]
        assert world.controller._services.mark(("team", "first")).uid == "uid-again"

    with_world(story)


def test_objects_of_engine_replicas_are_listed_again_before_the_first_reconcile():
    leads = asyncio.Event()

    def cluster(name):
        owner = {"kind": "LLMService", "name": "chat", "uid": "uid-1"}
        meta = {"name": name, "namespace": "team", "labels": {"rayloom.dev/service": "chat"}}
        return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta | {"ownerReferences": [owner]}}

    async def story(world):
        def names():
            return [each["metadata"]["name"] for each in world.controller.watches.clusters.of_service(KEY)]

        # The cluster changes, and no watch reports it.
        watches, world.kube._watches = world.kube._watches, []
        world.kube.lists.clear()
        world.kube.remove(f"{CLUSTERS}/chat-00000000-0")
        world.kube.put(cluster("chat-00000000-1"))
        world.kube._watches = watches
        assert names() == ["chat-00000000-0"]
        known, begin = [], world.controller._queue.open

        def open_queue():
            known.extend(names())
            begin()

        world.controller._queue.open = open_queue
        leads.set()
        await world.until(lambda: known)
        assert known == ["chat-00000000-1"]
        assert {"rayclusters", "pods", "endpointslices"} <= {path.split("/")[-1] for path in world.kube.lists}

    with_world(story, prepare=lambda kube: kube.put(cluster("chat-00000000-0")), leads=leads)


def test_an_event_of_a_pod_that_comes_before_that_of_its_service_forgets_nothing():
    forgotten = []

    async def story(world):
        async def forget(key):
            forgotten.append(key)

        world.controller._reconciler.forget = forget
        await world.controller._reconcile(KEY)
        assert forgotten == []
        world.controller.set_service(world.kube.objects[SERVICE], False)
        await world.until(lambda: world.kube.named("RayCluster"))
        # The service "third" was deleted before kopf listed it. `compare` finds this out, and the controller forgets
        # the service.
        world.kube.put(named("second"))
        world.controller._unreported["team", "third"] = "uid-third"
        await world.controller.missed_deletions.compare()
        await world.until(lambda: forgotten)
        assert forgotten == [("team", "third")]

    with_world(story, prepare=lambda kube: kube.put(service()))


def test_a_restarted_operator_writes_only_objects_that_were_edited_in_the_meantime():
    names = [f"chat-{number}" for number in range(40)]

    async def create(world):
        for name in names:
            world.controller.set_service(world.kube.put(named(name)), False)
        await world.until(lambda: len(world.kube.named("RayCluster")) == len(names))
        await world.rest()

    async def restart(world):
        world.kube.calls.clear()
        for path in [path for path, each in world.kube.objects.items() if each["kind"] == "LLMService"]:
            world.controller.set_service(world.kube.objects[path], False)
        await world.rest()
        assert world.kube.calls == [("apply", edited)]
        assert world.kube.objects[edited]["spec"]["ingress"]

    kube = FakeKube()
    with_world(create, kube=kube)
    edited = "/apis/networking.k8s.io/v1/namespaces/team/networkpolicies/chat-7-rayloom"
    kube.put(kube.objects[edited] | {"spec": {"podSelector": {}, "policyTypes": []}})
    with_world(restart, kube=kube)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_budget_that_somebody_changes_or_deletes_comes_back(is_deleted):
    async def story(world):
        world.ask_for(service(replicas=4))
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        path = world.kube.path("PodDisruptionBudget")
        wanted = world.kube.objects[path]["spec"]
        assert wanted["minAvailable"] == 8  # a head and a worker of each engine
        if is_deleted:
            world.kube.remove(path)
        else:
            world.kube.put(world.kube.objects[path] | {"spec": wanted | {"minAvailable": 0}})
        await world.until(lambda: world.kube.objects.get(path, {}).get("spec") == wanted)

    with_world(story)


def test_the_status_of_a_budget_is_no_change():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        world.kube.calls.clear()
        path = world.kube.path("PodDisruptionBudget")
        world.kube.put(world.kube.objects[path] | {"status": {"currentHealthy": 1}})
        await world.controller._reconcile(KEY)
        assert ("apply", path) not in world.kube.calls

    with_world(story)
