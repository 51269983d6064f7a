"""The controller if the API server refuses an object, or if another owner's object has its name."""

import pytest

from rayloom_operator.kube.client import KubeError
from rayloom_operator.observe.replicas import cluster_refusal
from rt_world import CLIENT_SERVICE, SERVICE, service, with_world


def test_a_service_object_of_somebody_else_is_left_alone_and_named():
    async def story(world):
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "chat", "namespace": "team"},
            "spec": {"selector": {"app": "theirs"}},
        }
        world.kube.put(theirs)
        world.ask_for(service())
        await world.until(lambda: world.reason("Accepted") == "ApplyRefused")
        assert world.message() == (
            "the Service chat exists and is not ours; delete it, or give this LLMService another name"
        )
        assert world.kube.objects[CLIENT_SERVICE]["spec"] == {"selector": {"app": "theirs"}}
        assert world.kube.named("RayCluster") == []

    with_world(story)


def test_a_pod_that_is_refused_again_under_another_name_is_one_event():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        path = world.kube.path("RayCluster")
        (name,) = world.kube.named("RayCluster")
        for suffix in ("abcde", "fghij"):
            message = f'pods "{name}-head-{suffix}" is forbidden: exceeded quota'
            failing = {"type": "ReplicaFailure", "status": "True", "message": message}
            world.kube.put(world.kube.objects[path] | {"status": {"conditions": [failing]}})
            await world.until(lambda: "exceeded quota" in world.message("Available"))
            await world.rest()
        told = {each["conditions"][4]["message"] for each in world.kube.statuses if "quota" in str(each)}
        assert len(told) == 1
        assert f'"{name}-head"' in told.pop()

    with_world(story)


def test_a_pod_that_kuberay_could_not_delete_is_no_refusal():
    message = 'FailedDeleteHeadPod\npods "chat-0-head" not found'
    failing = {"type": "ReplicaFailure", "status": "True", "reason": "FailedDeleteHeadPod", "message": message}
    cluster = {"metadata": {"name": "chat-0"}, "status": {"conditions": [failing]}}
    assert cluster_refusal(cluster) == ""
    failing["reason"] = "FailedCreateHeadPod"
    assert cluster_refusal(cluster) == message


def test_a_namespace_that_is_being_deleted_is_no_refusal():
    async def story(world):
        gone = KubeError(403, "unable to create new content in namespace team because it is being terminated")
        world.kube.refusals = {("apply", "chat-rayloom"): gone}
        world.ask_for(service())
        await world.until(lambda: ("apply", "/api/v1/namespaces/team/serviceaccounts/chat-rayloom") in world.kube.calls)
        await world.rest()
        assert world.kube.statuses == []

    with_world(story)


def test_a_successor_that_is_refused_is_made_once_it_is_not():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.kube.named("RayCluster"))
        await world.rest()
        (old,) = world.kube.named("RayCluster")
        changed = service(engine={"args": {"threads": 2}})
        changed["metadata"]["generation"] = 2
        world.kube.refusals = {("create", "-admin"): KubeError(403, "exceeded quota")}
        world.ask_for(changed | {"status": world.kube.objects[SERVICE].get("status")})
        await world.until(lambda: world.reason("Accepted") == "ApplyRefused")
        assert world.kube.named("RayCluster") in ([old], [])
        assert world.message() == "the API server refused: exceeded quota"
        world.kube.refusals = {}
        await world.until(
            lambda: world.kube.named("RayCluster") not in ([old], []) and world.reason("Accepted") == "Valid"
        )
        assert len(world.kube.named("RayCluster")) == 1

    with_world(story)


@pytest.mark.parametrize("code", [409, 429, 500])
def test_an_answer_that_may_be_another_one_later_is_no_refusal(code):
    async def story(world):
        world.kube.refusals["apply", "chat-rayloom"] = KubeError(code, "later")
        world.ask_for(service())
        await world.until(lambda: ("apply", "/api/v1/namespaces/team/serviceaccounts/chat-rayloom") in world.kube.calls)
        await world.rest()
        assert world.kube.statuses == []
        world.kube.refusals.clear()
        await world.until(lambda: world.reason() == "PodsPending")

    with_world(story)
