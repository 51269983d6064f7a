"""The controller with a cluster that is a dictionary: objects that are recreated, left unchanged or dropped.

Not covered: engines, because they need an address. e2e/api tests the answers of a real API server.
"""

import pytest

from rayloom_operator.decide.decision import decide
from rayloom_operator.kube.client import KubeUnreachable
from rayloom_operator.names import path_of
from rt_fake_kube import FakeKube
from rt_world import CLIENT_SERVICE, SERVICE, generation, head, known, service, with_world


def test_a_service_gets_its_objects_and_the_cluster_last():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        made = [path.split("/")[-2] for verb, path in world.kube.calls if verb in ("apply", "create")]
        assert [each for each in made if each not in ("chat", "events")] == [
            "serviceaccounts",
            "services",
            "poddisruptionbudgets",
            "networkpolicies",
            "controllerrevisions",
            "configmaps",
            "secrets",
            "rayclusters",
        ]

    with_world(story)


def test_a_model_that_does_not_allow_the_given_parallelism_creates_no_pod():
    async def story(world):
        world.ask_for(service(parallelism={"tensor": 2}))
        await world.until(lambda: world.reason() == "InvalidSpec")
        assert world.message().endswith("use one of 1, 3, 9, and for more ranks spec.parallelism.pipeline")
        world.ask_for(service(engine={"resources": {"limits": {"memory": "400Mi"}}}) | generation(2))
        await world.until(lambda: world.reason() == "DoesNotFit")
        assert world.kube.named("RayCluster") == []
        world.ask_for(service() | generation(3))
        await world.until(lambda: world.reason() == "PodsPending")

    with_world(story)


def test_a_shape_that_another_version_has_chosen_stays():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        sizing = world.kube.statuses[-1]["sizing"]
        assert (sizing["tensor"], sizing["kvTokens"]) == (1, 11_650 * 16)
        document = world.kube.objects[SERVICE]
        document["status"]["sizing"] |= {"tensor": 3, "kvTokens": 7}
        world.ask_for(document)
        await world.until(lambda: world.kube.statuses[-1]["shape"] == "TP3xPP1")
        assert world.kube.statuses[-1]["sizing"] == sizing | {"tensor": 3, "kvTokens": 7}
        # The sizing also survives an unusable spec.
        world.ask_for(document | service(parallelism={"tensor": 2}) | generation(2))
        await world.until(lambda: world.reason("Accepted") == "InvalidSpec")
        assert world.kube.statuses[-1]["sizing"]["tensor"] == 3

    with_world(story)


@pytest.mark.parametrize("times", [1, 2])
def test_a_cluster_that_is_deleted_by_hand_comes_back_at_once_under_another_name(times):
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        for _ in range(times):
            await world.rest()
            world.kube.remove(world.kube.path("RayCluster"))
            await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        for kind in ("RayCluster", "ConfigMap"):
            assert [each[-2:] for each in world.kube.named(kind)] == [f"-{times}"]

    with_world(story)


def test_the_name_of_a_cluster_is_free_again_after_a_minute(monkeypatch):
    monkeypatch.setattr("rayloom_operator.observe.resting_names._REST_S", 0.0)

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        first = world.kube.named("RayCluster")
        await world.rest()
        await end(world)
        world.ask_for(service(uid="uid-2"))
        await world.until(lambda: world.kube.named("RayCluster"))
        assert world.kube.named("RayCluster") == first

    with_world(story)


def test_a_service_recreated_at_once_uses_no_name_again():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        await end(world)
        world.ask_for(service(uid="uid-2"))
        await world.until(lambda: world.kube.named("RayCluster"))
        assert [each[-2:] for each in world.kube.named("RayCluster")] == ["-1"]

    with_world(story)


def test_a_restarted_operator_uses_no_name_again_of_which_pods_are_left():
    async def first(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        left = head(world.kube)
        await end(world)
        # KubeRay would count this pod as one of a new RayCluster with the same name. When this pod ends, a pod of the
        # new RayCluster would be missing.
        world.kube.put(left)

    async def second(world):
        world.ask_for(service(uid="uid-2"))
        await world.until(lambda: world.kube.named("RayCluster"))
        assert [each[-2:] for each in world.kube.named("RayCluster")] == ["-1"]

    kube = FakeKube()
    with_world(first, kube=kube)
    with_world(second, kube=kube)


async def end(world):
    """Deletes the service with all objects that it owns."""
    document = world.kube.objects.pop(SERVICE)
    world.controller.set_service(document, True)
    for path in [path for path, each in world.kube.objects.items() if each["kind"] != "CustomResourceDefinition"]:
        world.kube.remove(path)
    await world.rest()


def test_a_cluster_whose_label_was_taken_away_gets_it_back():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        path = world.kube.path("RayCluster")
        before = world.kube.objects[path]
        world.kube.remove(path)  # a watch reports DELETED for an object that the watch no longer selects
        world.kube.objects[path] = before | {"metadata": before["metadata"] | {"labels": {}}}
        await world.until(lambda: world.kube.objects[path]["metadata"]["labels"])
        assert world.kube.named("RayCluster") == [before["metadata"]["name"]]

    with_world(story)


def test_a_new_operator_gives_no_name_again_that_it_finds_in_the_status():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster") and world.kube.statuses)
        await world.rest()

    async def goes_on(world):
        world.controller.set_service(world.kube.objects[SERVICE], False)
        await world.until(lambda: world.kube.named("RayCluster"))
        assert [each[-2:] for each in world.kube.named("RayCluster")] == ["-1"]

    kube = FakeKube()
    with_world(story, kube=kube)
    kube.remove(kube.path("RayCluster"))
    with_world(goes_on, kube=kube)

    with_world(story)


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret"])
def test_a_missing_object_that_a_head_mounts_is_recreated(kind, monkeypatch):
    monkeypatch.setattr("rayloom_operator.decide.requeue.LATE_MOUNT_CHECK_S", 0.0)

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        path = world.kube.path(kind)
        world.kube.remove(path)
        world.kube.put(head(world.kube))
        await world.until(lambda: path in world.kube.objects)

    with_world(story)


def test_a_recreated_service_adopts_nothing():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        cluster, secret = world.kube.path("RayCluster"), world.kube.path("Secret")
        old = {path: each["metadata"]["uid"] for path, each in world.kube.objects.items()}
        first = world.kube.objects.pop(SERVICE)
        del world.kube.objects[CLIENT_SERVICE]
        world.ask_for(service(uid="uid-2"))
        # kopf reports both events, in either order.
        world.controller.set_service(first, True)
        await world.until(lambda: CLIENT_SERVICE in world.kube.objects)
        await world.rest()
        assert world.kube.objects[cluster]["metadata"]["uid"] == old[cluster]
        for path in (f"{cluster[:-1]}1", secret.replace("-0-", "-1-")):
            assert world.kube.objects[path]["metadata"]["ownerReferences"][0]["uid"] == "uid-2"

    with_world(story)


def test_a_service_that_vanished_unseen_is_forgotten_when_its_status_cannot_be_written():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        # The service and then its objects are deleted, but a broken watch does not report these deletions.
        del world.kube.objects[SERVICE]
        world.controller.set_service(
            service() | {"metadata": service()["metadata"] | {"resourceVersion": "999"}}, False
        )
        await world.until(lambda: not world.controller._services)
        await world.rest()
        world.kube.remove(world.kube.path("RayCluster"))
        await world.rest()
        assert world.kube.named("RayCluster") == []

    with_world(story)


def test_a_late_event_of_a_service_is_ignored():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        known = world.controller._services["team", "chat"]
        late = service(replicas=5)
        late["metadata"] |= {"resourceVersion": "1"}
        world.controller.set_service(late, False)
        world.controller.set_service(
            service(uid="uid-0") | {"metadata": service("uid-0")["metadata"] | {"resourceVersion": "999"}}, True
        )
        assert world.controller._services["team", "chat"] is known

    with_world(story)


def test_mount_events_are_read_once_per_interval_and_the_newest_counts():
    async def story(world):
        world.ask_for(service(model={"source": "file:///models/x"}) | known("file:///models/x"))
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        pod = head(world.kube)
        pod["spec"]["volumes"] = [{"name": "model"}]
        for time, words in (("01", 'old "model"'), ("03", 'new "model"'), ("02", 'older "model"')):
            world.kube.put(
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": f"e{time}", "namespace": "team"},
                    "involvedObject": {"uid": "uid-head"},
                    "message": words,
                    "lastTimestamp": f"2026-01-01T00:00:{time}Z",
                }
            )
        world.kube.put(pod)
        await world.until(lambda: world.reason("ModelReady") == "ModelNotFound")
        assert 'cannot mount the model: new "model"' in world.message("ModelReady")

    with_world(story)


def test_an_event_that_was_not_sent_is_sent_soon(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.reconciler._SOON_S", 0.1)

    async def story(world):
        world.kube.refusals = {("create", ""): KubeUnreachable("POST /events: away")}
        world.ask_for(service(parallelism={"tensor": 2}))
        await world.until(lambda: world.reason() == "InvalidSpec")
        await world.rest()
        assert world.kube.named("Event") == []
        num_statuses = len(world.kube.statuses)
        assert await world.controller._reconcile(("team", "chat")) == 0.1
        world.kube.refusals.clear()
        await world.until(lambda: world.kube.named("Event"))
        await world.rest()
        assert await world.controller._reconcile(("team", "chat")) == 300
        assert len(world.kube.named("Event")) == 1
        assert len(world.kube.statuses) == num_statuses

    with_world(story)


def test_a_deletion_without_an_event_is_found(monkeypatch):
    monkeypatch.setattr("rayloom_operator.reconcile.missed_deletions._INTERVAL_S", 0.05)

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        del world.kube.objects[SERVICE]
        await world.until(lambda: not world.controller._services)
        await world.rest()
        world.kube.remove(world.kube.path("RayCluster"))
        await world.rest()
        assert world.kube.named("RayCluster") == []

    with_world(story)


def test_the_paths_of_the_fake_are_those_of_the_operator():
    assert path_of(service()) == SERVICE


def test_an_error_in_the_operator_is_logged_with_its_traceback_and_the_service_is_requeued(monkeypatch, caplog):
    monkeypatch.setattr("rayloom_operator.reconcile.work_queue._FIRST_RETRY_S", 0.01)
    found = []

    def fail_once(situation):
        found.append(situation)
        if len(found) == 1:
            raise ZeroDivisionError("no such case")
        return decide(situation)

    monkeypatch.setattr("rayloom_operator.reconcile.reconciler.decide", fail_once)

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))

    with_world(story)
    (record,) = [each for each in caplog.records if "error in the operator" in each.message]
    assert record.exc_info[0] is ZeroDivisionError
