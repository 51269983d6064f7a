"""The controller recreates objects that nothing else recreates. The cluster is a dictionary.

Not covered: engines, which need an address. test_recovery.py tests the decisions and their times.
"""

from datetime import UTC, datetime, timedelta

import pytest

from rayloom_operator.kube.client import KubeError
from rayloom_operator.observe.nodes import Nodes
from rt_fake_kube import FakeKube
from rt_operator import crashed, make_pod_document
from rt_world import SERVICE, service, with_world

GAVE_UP = crashed(70, "ranks died")


def pod_of(world, number=0, *, name="head", node="n1", **kwargs):
    """A pod of the group with this number. The pod has no address, so the operator sends it no requests."""
    (cluster,) = [
        each["metadata"]
        for each in world.kube.objects.values()
        if each["kind"] == "RayCluster" and each["metadata"]["name"].endswith(f"-{number}")
    ]
    document = make_pod_document(name, node=node, owner=cluster["uid"], **kwargs)
    document["metadata"]["labels"] |= {"rayloom.dev/service": "chat", "rayloom.dev/group": cluster["name"]}
    document["status"]["podIP"] = ""
    return {"apiVersion": "v1", "kind": "Pod", **document}


def node(name="n1", ready="True", since=None):
    at = (since or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": ready, "lastTransitionTime": at}
    status = {"conditions": [{"type": "DiskPressure", "status": "False"}, ready], "images": [{"names": ["x"]}]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "namespace": ""}, "status": status}


def uids(world):
    return {
        each["metadata"]["name"][-1]: each["metadata"]["uid"]
        for each in world.kube.objects.values()
        if each["kind"] == "RayCluster"
    }


def group(world, number=0):
    return next(each for each in world.kube.statuses[-1]["groups"] if each["name"].endswith(f"-{number}"))


def test_an_engine_that_gave_up_is_recreated_and_the_status_is_written_first():
    async def story(world):
        world.ask_for(service(replicas=2))
        await world.until(lambda: len(uids(world)) == 2)
        await world.rest()
        before = uids(world)
        world.kube.calls.clear()
        world.kube.put(pod_of(world, 0, engine=GAVE_UP))
        await world.until(lambda: uids(world).keys() == {"1", "2"})
        assert uids(world)["1"] == before["1"]
        paths = [path for _, path in world.kube.calls if path.endswith("/status") or "rayclusters" in path]
        deleted = next(index for index, path in enumerate(paths) if "rayclusters" in path)
        assert f"{SERVICE}/status" in paths[:deleted]
        await world.until(lambda: group(world, 2)["restarts"] == 1)
        assert group(world, 2)["failure"]["message"] == "The engine gave up: ranks died"
        reasons = {each["reason"] for each in world.kube.objects.values() if each["kind"] == "Event"}
        assert "EngineFailed" in reasons

    with_world(story)


def test_an_engine_that_fails_again_waits_and_the_status_has_the_time():
    async def story(world):
        world.ask_for(service())
        for number in range(2):
            await world.until(lambda: uids(world))
            await world.rest()
            before = uids(world)
            world.kube.put(pod_of(world, number, name=f"head{number}", engine=GAVE_UP))
            await world.until(lambda before=before: uids(world) != before)
        await world.until(lambda: world.reason() == "GroupBackOff")
        await world.rest()
        assert uids(world) == {}
        found = group(world, 2)
        assert (found["state"], found["restarts"]) == ("BackOff", 2)
        wait = datetime.fromisoformat(found["nextRetryTime"]) - datetime.fromisoformat(found["failure"]["time"])
        assert wait == timedelta(seconds=10)
        assert world.reason("Degraded") == "GroupBackOff"

    with_world(story)


def test_an_operator_that_ends_between_writing_and_deleting_is_gone_on_from():
    first = []

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: uids(world))
        await world.rest()
        before = uids(world)
        first.extend([world.kube, before])
        world.kube.refusals["delete", "-0"] = KubeError(500, "the operator does not get that far")
        world.kube.put(pod_of(world, engine=GAVE_UP))
        await world.until(lambda: world.kube.statuses and group(world)["restarts"] == 1)
        await world.rest()
        assert uids(world) == before

    async def goes_on(world):
        world.kube.refusals.clear()
        world.controller.set_service(world.kube.objects[SERVICE], False)
        await world.until(lambda: uids(world) not in (first[1], {}))
        assert world.kube.statuses[-1]["groups"][0]["restarts"] == 1

    with_world(story)
    with_world(goes_on, kube=first[0])


@pytest.mark.parametrize("seconds_ago", [15, 14])
def test_pods_on_a_node_that_stays_away_are_taken_by_force(seconds_ago):
    async def story(world):
        world.kube.put(node())
        world.kube.put(node("n2", since=datetime.now(UTC) - timedelta(hours=1)))
        world.ask_for(service())
        await world.until(lambda: uids(world))
        await world.rest()
        worker = pod_of(world, name="worker", is_head=False)
        world.kube.put(worker)
        await world.rest()
        assert ("delete", "/api/v1/namespaces/team/pods/worker") not in world.kube.calls
        world.kube.put(node(ready="Unknown", since=datetime.now(UTC) - timedelta(seconds=seconds_ago)))
        # The operator deletes the pod at once, or when the node's time is over.
        await world.until(lambda: ("delete", "/api/v1/namespaces/team/pods/worker") in world.kube.calls)
        assert world.kube.graces["/api/v1/namespaces/team/pods/worker"] == 0

    with_world(story)


def test_no_node_counts_as_lost_while_no_node_of_the_cluster_is_ready():
    nodes, begin = Nodes(FakeKube(), lambda name: None), datetime(2026, 1, 2, 3, tzinfo=UTC)

    def see(name, ready, minute):
        nodes.reflector.take("MODIFIED", node(name, ready, begin + timedelta(minutes=minute)))

    def lost_after_minutes(name):
        at = nodes.lost_at(name, timedelta(minutes=2))
        return None if at is None else (at - begin) / timedelta(minutes=1)

    see("n1", "True", 0)
    see("n2", "Unknown", 10)
    assert (lost_after_minutes("n1"), lost_after_minutes("n2")) == (None, 12)
    see("n1", "Unknown", 11)
    assert (lost_after_minutes("n1"), lost_after_minutes("n2")) == (None, None)
    # The first node is ready again after an hour. The second node gets two more minutes.
    see("n1", "True", 60)
    assert (lost_after_minutes("n1"), lost_after_minutes("n2")) == (None, 62)


def test_services_on_lost_nodes_are_reconciled_when_the_first_node_is_ready_and_when_the_last_node_is_lost():
    changed = []
    nodes = Nodes(FakeKube(), changed.append)
    for name in ("n1", "n2", "n3"):
        nodes.reflector.take("ADDED", node(name, "Unknown"))
    changed.clear()

    nodes.reflector.take("MODIFIED", node("n1"))
    assert sorted(changed) == ["n1", "n2", "n3"]
    nodes.reflector.take("MODIFIED", node("n2"))
    assert sorted(changed) == ["n1", "n2", "n2", "n3"]
    nodes.reflector.take("DELETED", node("n2"))
    nodes.reflector.take("DELETED", node("n1"))
    assert sorted(changed) == ["n1", "n2", "n2", "n3", "n3"]


def test_a_node_that_is_ready_again_is_left_alone():
    async def story(world):
        world.kube.put(node(ready="Unknown"))
        world.ask_for(service())
        await world.until(lambda: uids(world))
        world.kube.put(pod_of(world, name="worker", is_head=False))
        await world.rest()
        world.kube.put(node())
        await world.rest()
        assert world.controller.watches.nodes.unready == {}
        assert "NodeLost" not in {each["reason"] for each in world.kube.objects.values() if each["kind"] == "Event"}

    with_world(story)


def test_more_and_fewer_replicas_make_and_take_engines_and_restart_none():
    async def story(world):
        world.ask_for(service())
        await world.until(lambda: uids(world))
        await world.rest()
        first = uids(world)["0"]
        for replicas in (3, 1):
            changed = service(replicas=replicas)
            changed["metadata"]["generation"] = 1 + replicas
            world.ask_for(changed | {"status": world.kube.objects[SERVICE]["status"]})
            await world.until(lambda replicas=replicas: len(uids(world)) == replicas)
            await world.rest()
            assert uids(world)["0"] == first
            assert world.kube.statuses[-1]["ready"] == f"0/{replicas}"

    with_world(story)
