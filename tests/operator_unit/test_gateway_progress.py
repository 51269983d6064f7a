"""The progress of the gateway's Deployment in status.gateway and the conditions: in decisions and in the controller."""

import pytest

from rayloom_operator.observe.deployments import progress_of
from rayloom_operator.observe.observed import DeploymentProgress
from rt_fake_kube import FakeKube
from rt_operator import conditions, make_pod, make_resolved, make_serving, turn
from rt_world import service, with_world

DEPLOYMENT = "/apis/apps/v1/namespaces/team/deployments/chat-gateway"
THROUGH = "http://chat-gateway.team.svc:8000"
QUOTA = 'pods "chat-gateway-6d4b-x7k2p" is forbidden: exceeded quota: small'


def gateways(number):
    return tuple(make_pod(f"gateway-{index}", is_head=False) for index in range(number))


def shown(num_wanted, num_ready, progress):
    """The status of a service whose engine serves, with `num_ready` ready gateway pods."""
    resolved = make_resolved(gateway={"replicas": num_wanted})
    before = {"gateway": {"replicas": num_wanted, "ready": 0, "reason": "Starting"}, "endpoint": THROUGH}
    groups = [make_serving(resolved)]
    previous = {**turn(resolved, groups).document, **before}
    return turn(resolved, groups, previous=previous, gateways=gateways(num_ready), gateway_progress=progress).document


def progress(num_pods, num_updated, **facts):
    return DeploymentProgress(num_pods=num_pods, num_updated=num_updated, **{"is_seen": True, **facts})


@pytest.mark.parametrize(
    ("wanted", "ready", "found", "reason"),
    [
        (2, 2, progress(2, 2), "Ready"),
        (2, 2, None, "Ready"),  # the Deployment is not known yet
        (2, 2, progress(3, 1), "Updating"),  # two former pods serve, a new pod does not
        (1, 1, progress(2, 1), "Updating"),
        (1, 1, progress(2, 1, is_late=True), "ProgressDeadlineExceeded"),
        (2, 2, progress(2, 2, is_seen=False), "Updating"),
        (2, 1, progress(2, 2), "Starting"),
        (3, 3, progress(2, 2), "Starting"),  # the watch of pods is ahead of the Deployment's
        (2, 0, progress(2, 2, is_late=True), "Starting"),  # the pods may wait for the tokenizer of a large model
        (2, 2, progress(2, 0, refusal="exceeded quota"), "ContainerFailed"),
    ],
)
def test_ready_means_that_every_pod_has_the_present_settings(wanted, ready, found, reason):
    assert shown(wanted, ready, found)["gateway"]["reason"] == reason


def test_an_update_that_does_not_end_counts_the_pods_with_the_new_settings():
    found = shown(2, 2, progress(3, 1, is_late=True))["gateway"]["message"]
    assert found.startswith("1 of 2 gateway pods have the new settings, and 2 have former ones; 2 take requests.")
    assert "Read the log of the newest gateway pod" in found


def test_the_refusal_of_a_pod_is_the_cause_for_the_service():
    found = shown(1, 0, progress(0, 0, refusal="exceeded quota: small"))
    assert "exceeded quota: small" in found["gateway"]["message"]
    assert conditions(found)["Available"] == ("False", "ContainerFailed")
    assert conditions(found)["Degraded"] == ("True", "ContainerFailed")
    without_pods = shown(1, 0, progress(0, 0))["gateway"]
    assert (without_pods["reason"], without_pods["message"]) == ("Starting", "No gateway pod exists yet.")


def test_a_refusal_keeps_the_same_words_for_every_attempt():
    def refusal(message, **facts):
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message, **facts}
        meta = {"name": "chat-gateway", "generation": 3}
        return progress_of({"metadata": meta, "status": {"conditions": [failure], "observedGeneration": 2}})

    assert refusal(QUOTA) == refusal(QUOTA.replace("x7k2p", "b8m3q"))
    assert "exceeded quota: small" in refusal(QUOTA).refusal
    assert refusal(QUOTA, status="False").refusal == ""
    assert not refusal(QUOTA).is_seen


def with_status(kube, **status):
    found = kube.objects[DEPLOYMENT]
    kube.put(found | {"status": {"observedGeneration": found["metadata"]["generation"], **status}})


def test_the_controller_shows_what_the_deployment_says():
    async def story(world):
        kube = world.kube
        world.ask_for(service(gateway={"replicas": 1}))
        await world.until(lambda: DEPLOYMENT in kube.objects)
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": QUOTA}
        with_status(kube, conditions=[failure])
        await world.until(lambda: world.reason("Degraded") == "ContainerFailed")
        assert "exceeded quota: small" in kube.statuses[-1]["gateway"]["message"]
        with_status(kube, replicas=2, updatedReplicas=1)
        await world.until(lambda: kube.statuses[-1]["gateway"]["reason"] == "Updating")
        await world.rest()
        assert [path for verb, path in kube.calls if path == DEPLOYMENT] == [DEPLOYMENT]  # a status is no drift
        with_status(kube, replicas=1, updatedReplicas=1)
        await world.until(lambda: kube.statuses[-1]["gateway"]["reason"] == "Starting")

    with_world(story, kube=FakeKube())
